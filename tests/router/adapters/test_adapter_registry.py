"""Routers that exchange their adapters in any order end with the same ones; names and folders that are refused."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.protos.adapter_ref import AdapterRef
from quire.protos.errors import InvalidRequest, ModelNotFound, Unavailable
from quire.router.adapters import adapter_registry
from quire.router.adapters.adapter_control import AdapterControl
from quire.router.adapters.adapter_registry import AdapterRegistry

NAMES = ("a", "b", "c")


def ref(name: str, number: int) -> AdapterRef:
    return AdapterRef(name, f"/{number}", f"digest{number}")


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["load", "unload", "exchange"]),
            st.integers(0, 2),
            st.sampled_from(NAMES),
            st.integers(0, 3),
        ),
        max_size=40,
    ),
    st.permutations(range(3)),
)
def test_after_all_exchanges_all_routers_know_the_same(events, order):
    routers = [AdapterRegistry() for _ in range(3)]
    for now, (what, i, name, number) in enumerate(events):
        # Clocks differ.
        now_ns = now * 10 + 7 * i
        if what == "load":
            routers[i].put(ref(name, number), now_ns)
        elif what == "unload":
            if routers[i].find(name) is not None:
                routers[i].remove(name, now_ns)
        else:
            routers[i].merge(routers[number % 3].plain())
    for i in [*order, *order]:
        for other in routers:
            other.merge(routers[i].plain())
    known = [[entry.ref for entry in router.loaded()] for router in routers]
    assert known[0] == known[1] == known[2]


def test_a_removed_adapter_does_not_come_back_from_a_router_that_missed_it():
    first, second = AdapterRegistry(), AdapterRegistry()
    first.put(ref("a", 1), 5)
    second.merge(first.plain())
    first.remove("a", 6)
    first.merge(second.plain())
    assert first.find("a") is None
    second.merge(first.plain())
    assert second.find("a") is None
    with pytest.raises(ModelNotFound, match="no adapter has the name 'a'"):
        second.remove("a", 7)


def test_the_number_of_names_is_bounded(monkeypatch):
    monkeypatch.setattr(adapter_registry, "MAX_ADAPTERS", 2)
    registry = AdapterRegistry()
    registry.put(ref("a", 1), 1)
    registry.put(ref("b", 2), 2)
    with pytest.raises(InvalidRequest, match="at most 2 adapters"):
        registry.put(ref("c", 3), 3)
    registry.put(ref("b", 4), 4)
    registry.remove("a", 5)
    registry.put(ref("c", 3), 6)
    assert [entry.ref.name for entry in registry.loaded()] == ["b", "c"]


class Replicas:
    """Note the calls; refuse what they are told to."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.errors: list = []

    async def load_adapter(self, ref: AdapterRef) -> list:
        self.calls.append(("load", ref.digest))
        return self.errors

    async def forget_adapter(self, digest: str) -> None:
        self.calls.append(("forget", digest))


def folder_of(path, text: str):
    path.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (path / name).write_text(text)
    return path


def test_loading_replaces_and_frees_what_no_name_uses(tmp_path):
    folder_of(tmp_path / "x", "1")
    folder_of(tmp_path / "y", "2")
    replicas = Replicas()
    control = AdapterControl("base", replicas, folder=tmp_path)

    async def run() -> None:
        x = (await control.load("one", "x")).ref.digest
        await control.load("two", "x")
        y = (await control.load("one", "y")).ref.digest
        assert replicas.calls == [("load", x), ("load", x), ("load", y)], "two still uses x"
        await control.unload("two")
        assert replicas.calls[-1] == ("forget", x)
        replicas.errors = [Unavailable("no memory")]
        with pytest.raises(Unavailable, match="no memory"):
            await control.load("three", "x")
        assert control.registry.find("three") is None

    asyncio.run(run())


@pytest.mark.parametrize(
    ("name", "path", "message"),
    [
        ("", "x", "name must be 1 to 256 bytes"),
        ("a" * 257, "x", "name must be 1 to 256 bytes"),
        ("a\nb", "x", "printable"),
        ("base", "x", "must differ from the model's"),
        ("a", "nowhere", "No such file"),
        ("a", "../x", "path must be below"),
        ("a", "/etc", "path must be below"),
        ("a", ".", "path must be below"),
        ("a", "link", "path must be below"),
        ("a", "x\0", "path"),
    ],
)
def test_names_and_folders_that_are_refused(tmp_path, name, path, message):
    root = tmp_path / "root"
    root.mkdir()
    folder_of(root / "x", "1")
    folder_of(tmp_path / "outside", "2")
    (root / "link").symlink_to(tmp_path / "outside")
    control = AdapterControl("base", folder=root)
    with pytest.raises(InvalidRequest, match=message):
        asyncio.run(control.load(name, path))


def test_without_a_folder_nothing_is_loaded_at_run_time(tmp_path):
    folder_of(tmp_path / "x", "1")
    with pytest.raises(InvalidRequest, match="adapter_folder is not configured"):
        asyncio.run(AdapterControl("base").load("a", str(tmp_path / "x")))
