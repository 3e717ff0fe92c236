"""AdapterPool: load, replace, unload, use, and nothing half-done."""

from __future__ import annotations

import contextlib
import gc
import json
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_files import EXPERTS, GOLDEN, QUERY, TINY, FakeExperts, FakeSite, factors, names, qwen3, sites, tiny, write

from fanfold.errors import (
    AdapterBusyError,
    AdapterExistsError,
    AdapterMismatchError,
    ArgumentError,
    DeviceMemoryError,
    FanfoldError,
    MissingFileError,
    PoolFullError,
    TensorError,
    UnknownAdapterError,
)
from fanfold.lora import AdapterPool, Rows
from fanfold.lora import prepare as lora_prepare
from fanfold.spec import ExpertShape

SHAPE = ExpertShape(3, 6, 4)
UP = f"{EXPERTS}.0.up_proj"


class Model:
    def __init__(self, places: Mapping[str, FakeSite]) -> None:
        self.adapter_sites = places
        self.adapter_rows = Rows()

    def held(self) -> dict[str, dict[int, Any]]:
        return {path: dict(site.held) for path, site in self.adapter_sites.items() if site.held}


@pytest.fixture
def model() -> Model:
    return Model(sites(1, SHAPE, {"self_attn.q_proj": (6, 8)}))


@pytest.fixture
def adapter(tmp_path: Path) -> Callable[..., Path]:
    """Writes an adapter of the given modules with the given seed."""

    def make(name: str, *modules: str, seed: int = 0, **fields: Any) -> Path:
        tensors: dict[str, torch.Tensor] = {}
        for module in modules or (QUERY, UP):
            inputs, outputs = (6, 8) if module == QUERY else (6, 4)
            tensors |= factors(module, 2, inputs, outputs, seed)
        return write(tmp_path / name, tensors, **fields)

    return make


def test_load_puts_pairs_in_the_lowest_free_slot(model: Model, adapter: Callable[..., Path]) -> None:
    pool = AdapterPool(model, slots=3)
    assert pool.load("alice", adapter("a", seed=1)) == 0
    assert pool.load("bob", str(adapter("b", QUERY, seed=2))) == 1
    assert pool.load("carol", adapter("c", UP, seed=3)) == 2
    assert pool.names() == ["alice", "bob", "carol"]
    assert [pool.slot(name) for name in pool.names()] == [0, 1, 2]
    query, experts = model.adapter_sites[QUERY], model.adapter_sites[EXPERTS]
    assert query.held.keys() == {0, 1}
    assert experts.held.keys() == {0, 2}
    assert torch.equal(query.held[1].a, factors(QUERY, 2, 6, 8, 2)[names(QUERY)[0]])
    assert torch.equal(experts.held[2]["up", 0].b, factors(UP, 2, 6, 4, 3)[names(UP)[1]])

    pool.unload("bob")
    assert query.held.keys() == {0}
    assert pool.names() == ["alice", "carol"]
    assert pool.load("dave", adapter("d", QUERY)) == 1
    assert pool.names() == ["alice", "dave", "carol"]


def test_pairs_arrive_in_the_dtype_of_their_site(adapter: Callable[..., Path]) -> None:
    model = Model(sites(1, SHAPE, {"self_attn.q_proj": (6, 8)}))
    model.adapter_sites[QUERY].dtype = torch.bfloat16
    AdapterPool(model).load("alice", adapter("a"))
    assert model.adapter_sites[QUERY].held[0].a.dtype == torch.bfloat16
    assert model.adapter_sites[EXPERTS].held[0]["up", 0].a.dtype == torch.float32


@pytest.mark.parametrize("name", ["", "base", None, 7])
def test_names(model: Model, adapter: Callable[..., Path], name: Any) -> None:
    with pytest.raises(ArgumentError, match="adapter name") as caught:
        AdapterPool(model).load(name, adapter("a"))
    assert caught.value.found == repr(name)


def test_slots(model: Model) -> None:
    for slots in (0, -1):
        with pytest.raises(ArgumentError, match="AdapterPool slots"):
            AdapterPool(model, slots=slots)


def test_a_target_that_takes_no_adapters() -> None:
    with pytest.raises(ArgumentError, match=r"found Linear, without adapter_sites and adapter_rows"):
        AdapterPool(torch.nn.Linear(2, 2))


def test_a_name_in_use_is_refused(model: Model, adapter: Callable[..., Path]) -> None:
    pool = AdapterPool(model)
    pool.load("alice", adapter("a"))
    before = model.held()
    with pytest.raises(AdapterExistsError, match="'alice'") as caught:
        pool.load("alice", adapter("b", seed=1))
    assert "replace()" in caught.value.next_step
    assert model.held() == before


def test_a_full_pool(model: Model, adapter: Callable[..., Path]) -> None:
    pool = AdapterPool(model, slots=2)
    pool.load("alice", adapter("a"))
    pool.load("bob", adapter("b"))
    with pytest.raises(PoolFullError, match="all 2 slots taken by alice, bob"):
        pool.load("carol", adapter("c"))
    assert pool.names() == ["alice", "bob"]


def test_unknown_names(model: Model, adapter: Callable[..., Path]) -> None:
    pool = AdapterPool(model)
    with pytest.raises(UnknownAdapterError, match="loaded are none"):
        pool.slot("alice")
    pool.load("alice", adapter("a"))
    calls: list[Callable[[], Any]] = [
        lambda: pool.unload("bob"),
        lambda: pool.slot("bob"),
        lambda: pool.replace("bob", adapter("b")),
        lambda: pool.using(["alice", "bob"]).__enter__(),
    ]
    for call in calls:
        with pytest.raises(UnknownAdapterError, match=r"'bob'.*loaded are alice"):
            call()
    assert model.adapter_rows.slots is None
    pool.unload("alice")  # the failed using holds no reference


def broken_adapters(folder: Path) -> list[tuple[Path, type[FanfoldError]]]:
    """Adapters whose load must fail."""
    good = factors(QUERY, 2, 6, 8)
    nan = dict(good)
    nan[names(QUERY)[1]] = nan[names(QUERY)[1]].clone().fill_(float("nan"))
    truncated = write(folder / "truncated", good)
    file = truncated / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    other = good | factors(f"{EXPERTS}.0.up_proj", 2, 7, 4)
    return [
        (folder / "nowhere", MissingFileError),
        (truncated, FanfoldError),
        (write(folder / "nan", nan), TensorError),
        (write(folder / "other", other), AdapterMismatchError),
        (write(folder / "experts", good | factors(f"{EXPERTS}.3.up_proj", 2, 6, 4)), AdapterMismatchError),
        (write(folder / "large", {name: tensor * 1e6 for name, tensor in good.items()}), TensorError),
    ]


def test_a_failed_load_or_replace_leaves_the_pool_as_it_was(
    model: Model, adapter: Callable[..., Path], tmp_path: Path
) -> None:
    model.adapter_sites[QUERY].dtype = torch.float16
    pool = AdapterPool(model)
    pool.load("alice", adapter("a"))
    before, info = model.held(), pool.info()
    for path, error in broken_adapters(tmp_path):
        with pytest.raises(error) as caught:
            pool.load("bob", path)
        assert str(caught.value).count(str(path)) == 1, "the message names the adapter's directory, once"
        with pytest.raises(error):
            pool.replace("alice", path)
        assert model.held() == before
        assert pool.info() == info
    assert pool.load("bob", adapter("b")) == 1


def test_a_site_that_fails_is_rolled_back(model: Model, adapter: Callable[..., Path]) -> None:
    pool = AdapterPool(model)
    pool.load("alice", adapter("a", QUERY))
    before = model.held()
    model.adapter_sites[EXPERTS].fail = True  # as on a device out of memory
    for call in (lambda: pool.load("bob", adapter("b")), lambda: pool.replace("alice", adapter("b", seed=1))):
        with pytest.raises(MemoryError):
            call()
        assert model.held() == before
        assert pool.names() == ["alice"]


def test_replace_keeps_the_slot_and_drops_what_the_new_one_lacks(model: Model, adapter: Callable[..., Path]) -> None:
    pool = AdapterPool(model)
    pool.load("alice", adapter("a"))
    pool.load("bob", adapter("b"))
    assert pool.replace("bob", adapter("c", UP, seed=5)) == 1
    assert model.adapter_sites[QUERY].held.keys() == {0}
    assert torch.equal(model.adapter_sites[EXPERTS].held[1]["up", 0].a, factors(UP, 2, 6, 4, 5)[names(UP)[0]])
    assert pool.info()[1]["path"] == str(adapter("c", UP, seed=5))


def test_using_sets_one_slot_a_row_and_restores_the_list_around_it(model: Model, adapter: Callable[..., Path]) -> None:
    pool = AdapterPool(model)
    pool.load("alice", adapter("a"))
    pool.load("bob", adapter("b"))
    rows = model.adapter_rows
    with pool.using(["alice", None, "bob", "base"]):
        assert rows.slots == [0, -1, 1, -1]
        with pool.using(("bob",)):
            assert rows.slots == [1]
        assert rows.slots == [0, -1, 1, -1]
        with contextlib.suppress(KeyError), pool.using([None]):
            assert rows.slots == [-1]
            raise KeyError
        with pytest.raises(UnknownAdapterError), pool.using(["alice", "carol"]):
            pytest.fail("not reached")
        assert rows.slots == [0, -1, 1, -1]
    assert rows.slots is None


@pytest.mark.parametrize("given", ["alice", None, 3, ["alice", 3], {"alice": 1}])
def test_using_wants_a_list_of_names(model: Model, adapter: Callable[..., Path], given: Any) -> None:
    pool = AdapterPool(model)
    pool.load("alice", adapter("a"))
    with pytest.raises(ArgumentError, match="using names"), pool.using(given):
        pytest.fail("not reached")
    assert model.adapter_rows.slots is None


def test_a_name_in_use_is_busy_and_others_are_free(model: Model, adapter: Callable[..., Path]) -> None:
    pool = AdapterPool(model)
    for name in ("alice", "bob"):
        pool.load(name, adapter(name))
    with pool.using(["alice", "alice", None]):
        with pool.using(["alice"]):
            pass
        for call in (lambda: pool.unload("alice"), lambda: pool.replace("alice", adapter("c"))):
            with pytest.raises(AdapterBusyError, match="'alice'"):
                call()
        pool.replace("bob", adapter("c", seed=1))
        pool.unload("bob")
        assert pool.load("carol", adapter("c")) == 1
        assert model.adapter_rows.slots == [0, 0, -1]
    pool.unload("alice")
    assert pool.names() == ["carol"]


def test_a_name_taken_while_its_files_are_read_is_refused(model: Model, adapter: Callable[..., Path]) -> None:
    """Two threads load under one name; one wins, and the other leaves nothing behind."""
    pool = AdapterPool(model)
    paths = [adapter(f"a{number}", seed=number) for number in range(4)]
    start = threading.Barrier(4)
    outcomes: list[object] = []

    def work(path: Path) -> None:
        start.wait()
        try:
            outcomes.append(pool.load("alice", path))
        except AdapterExistsError as error:
            outcomes.append(type(error))

    threads = [threading.Thread(target=work, args=(path,)) for path in paths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count(0) == 1
    assert outcomes.count(AdapterExistsError) == 3
    assert model.adapter_sites[QUERY].held.keys() == {0}


def test_a_single_layer_takes_its_part_of_an_adapter(adapter: Callable[..., Path]) -> None:
    layer = FakeExperts(EXPERTS, shape=SHAPE)
    pool = AdapterPool(Model({EXPERTS: layer}))
    pool.load("alice", adapter("a", QUERY, UP, "model.layers.1.mlp.experts.0.up_proj"))
    assert layer.held.keys() == {0}
    with pytest.raises(AdapterMismatchError, match="expected at least one for"):
        pool.load("bob", adapter("b", QUERY))


def test_a_single_linear_is_a_whole_model(adapter: Callable[..., Path], model: Model) -> None:
    pool = AdapterPool(Model({QUERY: model.adapter_sites[QUERY]}))
    with pytest.raises(AdapterMismatchError, match="no such module"):
        pool.load("alice", adapter("a"))


def test_info_of_samples() -> None:
    pool = AdapterPool(Model(qwen3()))
    folder = GOLDEN / "peft_qwen3moe_all_linear"
    pool.load("all", folder)
    (info,) = pool.info()
    assert (
        json.loads(json.dumps(info))
        == info
        == {
            "name": "all",
            "slot": 0,
            "path": str(folder),
            "ranks": [4, 8],
            "scales": [2.0],
            "targets": {"gate": 16, "up": 16, "down": 16, "linear": 10},
            "bytes": 295424,  # ranks of 4 are kept as 8; gate and up share their A, as in the file
        }
    )


def test_the_example_adapters_live_side_by_side() -> None:
    model = Model(tiny())
    pool = AdapterPool(model, slots=3)
    for name in ("scripture", "shout", "python"):
        pool.load(name, TINY / f"adapter-{name}")
    assert [info["ranks"] for info in pool.info()] == [[16], [4], [8]]
    assert [info["scales"] for info in pool.info()] == [[2.0], [4.0], [2.0]]
    assert model.adapter_sites["model.layers.3.mlp.experts"].held.keys() == {0, 1, 2}
    for name in pool.names():
        pool.unload(name)
    assert model.held() == {}


def test_sites_get_room_for_slots_and_ranks(model: Model, adapter: Callable[..., Path]) -> None:
    old = AdapterPool(model)
    old.load("alice", adapter("a"))
    AdapterPool(model, slots=3, max_rank=48)
    for site in model.adapter_sites.values():
        assert site.reserved == (3, 48)
        assert site.held == {}


@pytest.mark.parametrize("max_rank", [0, 513])
def test_max_rank_of_a_pool(model: Model, max_rank: int) -> None:
    with pytest.raises(ArgumentError, match="AdapterPool max_rank: found"):
        AdapterPool(model, max_rank=max_rank)


def test_ranks_above_the_pools_are_refused(model: Model, adapter: Callable[..., Path]) -> None:
    pool = AdapterPool(model, max_rank=1)
    with pytest.raises(AdapterMismatchError, match="rank 2; expected at most 1, the pool's max_rank") as caught:
        pool.load("alice", adapter("a"))
    assert "max_rank=2" in caught.value.next_step
    assert pool.names() == []


def test_the_idle_adapter_used_longest_ago_makes_room(model: Model, adapter: Callable[..., Path]) -> None:
    pool = AdapterPool(model, slots=2, evict=True)
    for name in ("a", "b"):
        pool.load(name, adapter(name))
    with pool.using(["a"]):
        pass
    assert pool.load("c", adapter("c")) == 1  # in b's slot
    assert pool.names() == ["a", "c"]
    with pool.using(["c"]):
        assert pool.load("d", adapter("d")) == 0  # a is idle, c is not
        with pool.using(["d"]), pytest.raises(PoolFullError, match="all 2 slots taken"):
            pool.load("e", adapter("e"))
        assert pool.names() == ["d", "c"]
    assert pool.stats()["evictions"] == 2
    assert model.adapter_sites[QUERY].held.keys() == {0, 1}


def test_a_failed_load_evicts_nothing(model: Model, adapter: Callable[..., Path], tmp_path: Path) -> None:
    pool = AdapterPool(model, slots=1, evict=True)
    pool.load("a", adapter("a"))
    held = model.held()
    with pytest.raises(MissingFileError):
        pool.load("b", tmp_path / "nowhere")
    assert (pool.names(), model.held()) == (["a"], held)


def test_stats(model: Model, adapter: Callable[..., Path]) -> None:
    pool = AdapterPool(model, slots=3)
    assert pool.stats() == {"slots": 3, "used": 0, "bytes": 0, "uses": {}, "evictions": 0, "unknown_ids": 0}
    pool.load("a", adapter("a"))
    pool.load("b", adapter("b", QUERY))
    for listed in (["a", None, "a"], ["b", "a"]):
        with pool.using(listed):
            pass
    query, up = 4 * 8 * (6 + 8), 4 * 8 * (6 + 4)  # fp32, rank 2 kept as 8
    assert pool.stats() == {
        "slots": 3,
        "used": 2,
        "bytes": query + up + query,
        "uses": {"a": 2, "b": 1},
        "evictions": 0,
        "unknown_ids": 0,
    }
    pool.unload("a")
    assert pool.stats()["uses"] == {"b": 1}


@pytest.mark.parametrize("call", ["replace", "unload"])
def test_waiting_for_a_block_to_end(model: Model, adapter: Callable[..., Path], call: str) -> None:
    pool = AdapterPool(model)
    pool.load("a", adapter("a"))
    other = adapter("b", seed=5)
    done: list[str] = []

    def work() -> None:
        if call == "replace":
            pool.replace("a", other, wait=True)
        else:
            pool.unload("a", wait=True)
        done.append(call)

    with pool.using(["a"]):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(timeout=0.3)
        assert thread.is_alive()
        assert done == []
    thread.join(timeout=20)
    assert done == [call]
    assert pool.names() == (["a"] if call == "replace" else [])


def test_no_room_on_the_device(model: Model, adapter: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    pool = AdapterPool(model)
    pool.load("a", adapter("a"))
    held = model.held()

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("fanfold.lora.prepare.convert", full)
    for call in (lambda: pool.load("b", adapter("b")), lambda: pool.replace("a", adapter("b"))):
        with pytest.raises(DeviceMemoryError, match=f"expected {4 * 8 * (6 + 8) + 4 * 8 * (6 + 4)} free bytes"):
            call()
        assert (pool.names(), model.held()) == (["a"], held)


def test_a_thousand_adapters_on_disk_through_64_slots(model: Model, adapter: Callable[..., Path]) -> None:
    """Each is in a slot when it is used, whoever had it before; slots never hold what has gone.

    Once through all of them in order, so that none is there when it is wanted, and then at random.
    """
    paths = [adapter(f"a{number}", UP, seed=number) for number in range(1000)]
    pool = AdapterPool(model, slots=64, evict=True)
    rng = random.Random(1)
    for turn, number in enumerate([*range(1000), *(rng.randrange(1000) for _ in range(500))]):
        name = f"user{number}"
        assert turn >= 1000 or name not in pool.names()
        if name not in pool.names():
            pool.load(name, paths[number])
        with pool.using([name, None]):
            held = model.adapter_sites[EXPERTS].held[pool.slot(name)]["up", 0].b
            assert torch.equal(held, factors(UP, 2, 6, 4, number)[names(UP)[1]]), turn
            assert model.adapter_rows.slots == [pool.slot(name), -1]
        assert pool.stats()["uses"].keys() == set(pool.names())
    stats = pool.stats()
    assert stats["used"] == 64
    assert stats["evictions"] > 1000 - 64 + 400
    assert stats["bytes"] == 64 * 4 * 8 * (6 + 4)  # fp32, rank 2 kept as 8
    assert model.adapter_sites[EXPERTS].held.keys() == set(range(64))


@pytest.mark.parametrize("enabled", [True, False])
def test_no_collection_starts_while_an_adapter_is_read(
    enabled: bool, model: Model, adapter: Callable[..., Path]
) -> None:
    """With a threshold of one object any would, and the collector is afterwards as it was, also where a load fails."""
    pool = AdapterPool(model)
    good, bad = adapter("good"), adapter("bad", seed=1)
    (bad / "adapter_model.safetensors").write_bytes(b"no file")
    inside: list[bool] = []
    reading: list[bool] = []
    found, threshold = gc.isenabled(), gc.get_threshold()

    def started(phase: str, _info: dict[str, int]) -> None:
        inside.append(phase == "start" and bool(reading))

    real = lora_prepare.opened_adapter

    @contextlib.contextmanager
    def opened(path: str | Path) -> Iterator[Any]:
        reading.append(True)
        try:
            with real(path) as both:
                yield both
        finally:
            reading.clear()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lora_prepare, "opened_adapter", opened)
        try:
            gc.set_threshold(1)
            (gc.enable if enabled else gc.disable)()
            gc.callbacks.append(started)
            pool.load("good", good)
            assert gc.isenabled() == enabled
            with pytest.raises(FanfoldError):
                pool.load("bad", bad)
            assert gc.isenabled() == enabled
        finally:
            gc.callbacks.remove(started)
            gc.set_threshold(*threshold)
            (gc.enable if found else gc.disable)()
    assert not any(inside)
    assert pool.names() == ["good"]
