"""Who keeps which tensor of sharded ranks: layers stay together, and none holds much more than a share."""

from __future__ import annotations

from insitu_train.trainer.owners import owners_of

LAYER = {"mlp.experts.0.up.weight": 7, "mlp.experts.1.up.weight": 7, "q.weight": 4, "q.lora_A": 1}
SIZES = {
    "model.embed.weight": 30,
    **{f"model.layers.{n}.{name}": size for n in range(10) for name, size in LAYER.items()},
    "model.norm.weight": 1,
    "head.weight": 30,
}


def test_a_layer_has_one_owner_and_ranks_hold_equal_shares() -> None:
    for count in (1, 2, 4):
        owners = owners_of(SIZES, count)
        assert owners.keys() == SIZES.keys()
        for n in range(10):
            assert len({owners[f"model.layers.{n}.{name}"] for name in LAYER}) == 1
        loads = [sum(SIZES[name] for name, owner in owners.items() if owner == rank) for rank in range(count)]
        assert max(loads) <= sum(SIZES.values()) / count + 30


def test_every_rank_finds_the_same_owners_whatever_the_order() -> None:
    assert owners_of(SIZES, 3) == owners_of(dict(reversed(SIZES.items())), 3)
