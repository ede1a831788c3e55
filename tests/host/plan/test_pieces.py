"""Parameters cut into pieces, and spread over channels."""

import random

import pytest

from nearstep.errors import ArgumentError
from nearstep.plan.pieces import Item, Layer, cut


def test_equal_parameters_go_to_the_channels_in_turn() -> None:
    layers = [Layer(name=str(i), parameters=(8, 8)) for i in range(3)]
    channels = [piece.channel for layer in cut(layers, 3, 100) for piece in layer]
    assert channels == [0, 1, 2, 0, 1, 2]


def test_weights_do_not_all_go_to_the_channel_of_the_first() -> None:
    layers = [Layer(name=str(i), parameters=(1000, 10)) for i in range(10)]
    held = [0, 0]
    for layer in cut(layers, 2, 10_000):
        for piece in layer:
            held[piece.channel] += piece.elements
    assert held == [5050, 5050]


@pytest.mark.parametrize("seed", range(5))
def test_pieces_cover_every_parameter_once(seed: int) -> None:
    print(f"seed {seed}")
    choose = random.Random(seed)
    checks = 0
    for _ in range(100):
        sizes = [
            tuple(choose.randint(1, 300) for _ in range(choose.randint(0, 4)))
            for _ in range(choose.randint(1, 5))
        ]
        most = choose.randint(1, 120)
        layers = [Layer(name=str(i), parameters=each) for i, each in enumerate(sizes)]
        found = cut(layers, choose.randint(1, 4), most)
        assert [piece.index for layer in found for piece in layer] == list(
            range(sum(map(len, found)))
        )
        for index, parameters in enumerate(sizes):
            for parameter, elements in enumerate(parameters):
                parts = [each for each in found[index] if each.parameter == parameter]
                assert all(each.layer == index for each in parts)
                assert [each.start for each in parts] == [0, *(e.stop for e in parts[:-1])]
                assert parts[-1].stop == elements
                lengths = {each.elements for each in parts}
                assert max(lengths) <= most
                assert max(lengths) - min(lengths) <= 1
                checks += 1
    assert checks > 100


def test_an_item_has_the_bytes_of_fp32() -> None:
    ((piece,),) = cut([Layer(name="a", parameters=(7,))], 1, 7)
    assert (piece.nbytes, Item(piece, "m").nbytes) == (28, 28)


@pytest.mark.parametrize(("channels", "most"), [(0, 1), (1, 0), (-1, 5)])
def test_numbers_below_1_are_refused(channels: int, most: int) -> None:
    with pytest.raises(ArgumentError, match=f"not {channels} and {most}"):
        cut([Layer(name="a", parameters=(7,))], channels, most)


def test_a_parameter_without_elements_is_refused_by_the_name_of_its_layer() -> None:
    with pytest.raises(ArgumentError, match="head: elements must be at least 1, not 0"):
        cut([Layer(name="head", parameters=(3, 0))], 1, 4)
