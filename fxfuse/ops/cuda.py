from .chunked import linear_loss, linear_stats, linear_stats_backward
