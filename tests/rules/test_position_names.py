"""Which names the positions of a saved optimizer may have."""

from tests.rules.test_following import followed, net, sources


def test_an_order_that_no_shape_tells_is_open(tmp_path):
    trained, wanted = net(a=(3, 3), b=(3, 3)), net(b=(3, 3), a=(3, 3))
    ways_on = followed(tmp_path / "run.pth", trained, wanted)
    assert len(ways_on) == 2
    assert {tuple(sources(way)) for way in ways_on} == {(0, 1, 2, 3), (2, 3, 0, 1)}
