"""Objects that are known as long as something else keeps them."""

from __future__ import annotations

from fxfuse.living import Living


class Thing:
    pass


def test_what_has_gone_is_forgotten() -> None:
    living: Living[Thing] = Living()
    one, other = Thing(), Thing()
    living.track(one)
    living.track(other)
    living.track(one)
    assert len(living) == 2 and set(living.all()) == {one, other}
    del other
    assert len(living) == 1 and living.all() == [one]
