"""Sharded state through kills, resizes and damage: real ranks on gloo, and the same numbers as if nothing had happened."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch._C._distributed_c10d import TCPStore

import strata
from strata.checkpoint.catalog.listing import Catalog
from strata.checkpoint.catalog.manifest import SHARDED, Manifest
from strata.checkpoint.catalog.naming import MODEL
from strata.checkpoint.copying.staging import MARK_NAME
from strata.checkpoint.export import export
from strata.checkpoint.image.layout import FILE_NAME
from strata.checkpoint.importing import adopt
from strata.stores import open_store
from tests.support import eventually
from tests.support_forks import ForkedProcess
from tests.support_ranks import RANKS
from tests.training.shard_script import BATCH, SAMPLES

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[2]
STEPS = 12
AGENT_WAITS_S = 30.0
"""Between SIGTERM and SIGKILL, as torchrun does."""


@dataclass
class Ended:
    codes: list[int]
    outputs: list[str]

    @property
    def output(self) -> str:
        return "\n".join(self.outputs)

    @property
    def resumed(self) -> str:
        """What the first rank said about its start."""
        return next((line for line in self.output.splitlines() if line.startswith("resumed ")), "")


@contextlib.contextmanager
def started(
    kind: str,
    folder: Path,
    world: int,
    *,
    steps: int = STEPS,
    die_at: int = -1,
    env: dict[str, str] | None = None,
) -> Iterator[list[ForkedProcess]]:
    """The ranks of one start of the job, which end with the context."""
    folder.mkdir(exist_ok=True)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        RANKS.start(
            *("tests.training.shard_script", kind, str(folder), str(steps), str(die_at)),
            output=folder / f"output-{store.port}-{rank}",
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(world),
                "WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "OMP_NUM_THREADS": "1",
                **(env or {}),
            },
        )
        for rank in range(world)
    ]
    try:
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def ended(ranks: list[ForkedProcess]) -> Ended:
    outputs = [process.communicate(timeout=300)[0] for process in ranks]
    return Ended(codes=[process.wait() for process in ranks], outputs=outputs)


def kill_one(ranks: list[ForkedProcess], victim: ForkedProcess) -> Ended:
    """Kill one rank; the others are ended as an agent does it, for they may still be waiting to meet that one."""
    victim.kill()
    victim.wait()
    for process in ranks:
        process.terminate()
    for process in ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=AGENT_WAITS_S)
        process.kill()
    return ended(ranks)


def run(kind: str, folder: Path, world: int, **options: Any) -> Ended:
    """One start of the job, until all its ranks have ended."""
    with started(kind, folder, world, **options) as ranks:
        return ended(ranks)


def finish(kind: str, folder: Path, world: int, **options: Any) -> Ended:
    ended = run(kind, folder, world, **options)
    assert ended.codes == [0] * world, ended.output
    return ended


def crash(kind: str, folder: Path, world: int, *, at: int, **options: Any) -> Ended:
    ended = run(kind, folder, world, die_at=at, **options)
    assert -signal.SIGKILL in ended.codes, ended.output
    return ended


def losses(folder: Path) -> dict[int, float]:
    """The loss of each step, as the first rank has seen it last."""
    lines = (folder / "losses-0").read_text().splitlines(keepends=True)
    return dict(json.loads(line) for line in lines if line.endswith("\n"))


def final(folder: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(folder / "final", weights_only=True)
    return state


def check_same(folder: Path, undisturbed: Path) -> None:
    mine, other = final(folder), final(undisturbed)
    assert mine.keys() == other.keys()
    assert [name for name in mine if not same_bits(mine[name], other[name])] == []
    assert losses(folder) == losses(undisturbed)


def check_close(folder: Path, undisturbed: Path, steps: int) -> None:
    mine, other = losses(folder), losses(undisturbed)
    assert sorted(mine) == list(range(1, steps + 1))
    assert max(abs(mine[step] - other[step]) for step in mine) < 1e-5
    for name, value in final(folder).items():
        torch.testing.assert_close(value, final(undisturbed)[name], rtol=0, atol=1e-4)


def check_audit(destination: Path, steps: int = STEPS) -> None:
    covered = 0
    for epoch in range(-(-steps * BATCH // SAMPLES)):
        report = strata.audit(destination, "numbers", epoch)
        assert report.clean, report.reason
        covered += report.samples
    assert covered == steps * BATCH


def check_exported(folder: Path, destination: str) -> None:
    """The parameters, exported, imported and exported again, are those that training has ended with."""
    out, again = folder / "exported.pt", folder / "exported-again.safetensors"
    export(str(folder / destination), str(out), format="pt")
    adopt(str(out), str(folder / "next"))
    export(str(folder / "next"), str(again), format="safetensors", key=MODEL)
    ended = {
        name: value for name, value in final(folder).items() if not name.startswith(("ema.", "optimizer."))
    }
    for found in (torch.load(out, weights_only=True)[MODEL], load_file(again)):
        assert found.keys() == ended.keys()
        assert [name for name, value in ended.items() if not same_bits(found[name], value)] == []


def manifests(destination: Path) -> list[Manifest]:
    found = [entry.manifest for entry in Catalog(open_store(str(destination))).list().entries]
    return [manifest for manifest in found if manifest.format == SHARDED]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a job that nothing has happened to."""
    done: dict[tuple[Any, ...], Path] = {}

    def of(kind: str, world: int, steps: int = STEPS, **env: str) -> Path:
        key = (kind, world, steps, *sorted(env.items()))
        if key not in done:
            done[key] = tmp_path_factory.mktemp("undisturbed") / kind
            finish(kind, done[key], world, steps=steps, env=env)
        return done[key]

    return of


def assert_resumed_from_memory(ended: Ended, step: int) -> None:
    """From the snapshot of this step, or, where a rank died before its part was complete, of the one before."""
    wanted = tuple(f"resumed {number} from MEMORY" for number in (step, step - 1))
    assert ended.resumed.startswith(wanted), ended.output


def test_a_killed_rank_costs_the_step_it_was_in(tmp_path: Path, undisturbed: Callable[..., Path]) -> None:
    folder = tmp_path / "job"
    crash("fsdp", folder, 2, at=7, env={"DIES": "1", "SETTLED": "1"})
    ended = finish("fsdp", folder, 2)
    assert_resumed_from_memory(ended, 6)
    check_same(folder, undisturbed("fsdp", 2))
    for destination in ("near", "far"):
        check_audit(folder / destination)


def test_resizes_keep_the_loss_curve(tmp_path: Path, undisturbed: Callable[..., Path]) -> None:
    folder = tmp_path / "job"
    crash("fsdp", folder, 2, at=4)
    crash("fsdp", folder, 3, at=7, env={"DIES": "2"})
    crash("fsdp", folder, 1, at=10, env={"SETTLED": "1"})
    ended = finish("fsdp", folder, 4)
    assert_resumed_from_memory(ended, 9)
    check_close(folder, undisturbed("fsdp", 2), STEPS)
    check_exported(folder, "far")
    check_audit(folder / "far")
    # Of the machine's memory nothing is left.
    assert not list((folder / "memory").rglob(FILE_NAME))


def test_resizes_of_tensor_parallel_ranks(tmp_path: Path, undisturbed: Callable[..., Path]) -> None:
    folder = tmp_path / "job"
    crash("tp", folder, 4, at=5, env={"DIES": "3"})
    crash("tp", folder, 2, at=9)
    # In another world, ranks that read the same data draw the same random numbers.
    assert len({(folder / f"draw-2-{rank}").read_text() for rank in range(2)}) == 1
    finish("tp", folder, 2, env={"TP": "1"})
    check_close(folder, undisturbed("fsdp", 2), STEPS)
    check_exported(folder, "near")
    check_audit(folder / "near")


def test_resizes_of_replicated_shards(tmp_path: Path, undisturbed: Callable[..., Path]) -> None:
    folder = tmp_path / "job"
    crash("hsdp", folder, 4, at=6, env={"DIES": "2"})
    finish("hsdp", folder, 2)
    check_close(folder, undisturbed("fsdp", 2), STEPS)
    check_exported(folder, "near")
    check_audit(folder / "near")
    newest = manifests(folder / "near")[0]
    alone = manifests(undisturbed("fsdp", 2) / "near")[0]
    assert newest.size_bytes < alone.size_bytes * 1.5  # Replicas are written once.


def test_a_mixed_state_goes_through_kills_and_resizes_bit_for_bit(
    tmp_path: Path, undisturbed: Callable[..., Path]
) -> None:
    """Tied, frozen and narrow parameters, of one number or of none; buffers; an offloaded and fused optimizer; blocks that are
    compiled or computed twice."""
    folder, steps = tmp_path / "job", 6
    crash("mixed", folder, 2, at=5, env={"SETTLED": "1"})
    assert_resumed_from_memory(finish("mixed", folder, 2, steps=steps), 4)
    check_same(folder, undisturbed("mixed", 2, steps))
    check_audit(folder / "near", steps)
    saved = final(folder)
    for world in (3, 1):  # They find that all steps are made.
        (folder / "final").unlink()
        finish("mixed", folder, world, steps=steps)
        assert [name for name, value in final(folder).items() if not same_bits(value, saved[name])] == []


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(
        *(each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
    )


def test_slices_come_from_the_memory_of_other_machines(
    tmp_path: Path, undisturbed: Callable[..., Path]
) -> None:
    """Three machines with one rank each; the third is new, and no destination has anything yet."""
    folder, apart = tmp_path / "job", {"APART": "1", "SAVE_EVERY": "100"}
    crash("fsdp", folder, 2, at=5, env={**apart, "SETTLED": "1"})
    crash("fsdp", folder, 3, at=8, env={**apart, "SETTLED": "1", "DIES": "2"})
    ended = finish("fsdp", folder, 3, env=apart)
    assert_resumed_from_memory(ended, 7)
    check_close(folder, undisturbed("fsdp", 2), STEPS)
    check_audit(folder / "far")


def test_a_lost_machine_leaves_what_is_durable(tmp_path: Path, undisturbed: Callable[..., Path]) -> None:
    folder, apart = tmp_path / "job", {"APART": "1", "SETTLED": "1"}
    crash("fsdp", folder, 2, at=7, env=apart)
    shutil.rmtree(folder / "memory-1")
    ended = finish("fsdp", folder, 2, env=apart)
    assert ended.resumed.startswith("resumed 4 from"), ended.output
    assert "1 of its 2 parts are missing" in ended.resumed
    check_same(folder, undisturbed("fsdp", 2))


def flip(path: Path, at: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 1
    path.write_bytes(data)


def images(folder: Path) -> dict[int, list[tuple[int, Path]]]:
    """The images in memory of each rank: step and file."""
    found: dict[int, list[tuple[int, Path]]] = {}
    for mark in (folder / "memory").rglob(MARK_NAME):
        body = json.loads(mark.read_text())["body"]
        found.setdefault(body["layout"]["rank"], []).append((body["step"], mark.with_name(FILE_NAME)))
    return {rank: sorted(each, reverse=True) for rank, each in found.items()}


def largest_tensor(image: Path) -> float:
    """Where in an image there are tensor bytes for certain."""
    entries = json.loads(image.with_name(MARK_NAME).read_text())["body"]["tensors"]
    entry = next(e for e in entries if e[0].startswith("model_state_dict") and e[4] > 8)
    return float(entry[3] + 4) / image.stat().st_size


def test_damage_in_one_tier_after_the_other(tmp_path: Path, undisturbed: Callable[..., Path]) -> None:
    """The crash comes right after step 8, which is in memory and in both destinations."""
    base = tmp_path / "base"
    crash("fsdp", base, 2, at=9, env={"SETTLED": "1"})
    assert [each[0][0] for each in images(base).values()] == [8, 8]
    newest = {name: manifests(base / name)[0] for name in ("near", "far")}
    assert {manifest.step for manifest in newest.values()} == {8}
    assert newest["near"].layout == newest["far"].layout

    def damaged(name: str, *, memory: bool, near: bool, far: bool, lost: bool = False) -> Ended:
        folder = tmp_path / f"damaged-{name}"
        shutil.copytree(base, folder)
        # A run that has moved would be another one: only its memory's folder is looked at by path.
        if lost:
            shutil.rmtree(folder / "memory")
        elif memory:
            image = images(folder)[1][0][1]
            flip(image, largest_tensor(image))
        if near:
            flip(folder / "near" / newest["near"].parts[1].key, 0.1)
        if far:
            flip(folder / "far" / newest["far"].parts[1].key, 0.1)
        ended = finish("fsdp", folder, 2)
        check_same(folder, undisturbed("fsdp", 2))
        return ended

    assert damaged("nothing", memory=False, near=False, far=False).resumed.startswith("resumed 8 from MEMORY")
    one = damaged("memory", memory=True, near=False, far=False)
    assert one.resumed.startswith("resumed 8 from NVME")  # A part of it, for one image is damaged.
    assert "bytes changed since they were saved" in one.resumed
    assert damaged("lost", memory=False, near=False, far=False, lost=True).resumed.startswith(
        "resumed 8 from NVME"
    )
    two = damaged("near", memory=True, near=True, far=False)
    assert two.resumed.startswith("resumed 8 from"), two.output
    assert "bytes changed since they were saved" in two.resumed
    three = damaged("everywhere", memory=True, near=True, far=True)
    assert three.resumed.startswith("resumed 7 from MEMORY"), three.output
    four = damaged("durable", memory=False, near=True, far=True, lost=True)
    assert four.resumed.startswith("resumed 4 from NVME"), four.output
    for each in (three, four):
        assert "bytes changed since they were saved" in each.resumed


def test_nobody_restores_what_a_stopped_start_completes_after_it_was_taken_over(
    tmp_path: Path, undisturbed: Callable[..., Path]
) -> None:
    """Its ranks are stopped when all parts of step 8 are written, and the first has asked whether it may put the manifest and
    is about to do so. The start after it continues from step 4, and comes to step 5."""
    folder, env = tmp_path / "job", {"TORCHELASTIC_RUN_ID": "launch", "SETTLED": "1", "DESTINATIONS": "far"}
    with started("fsdp", folder, 2, env={**env, "STOPPED": "0:8", "SNAPSHOT_EVERY": "0"}) as zombies:
        first = psutil.Process(zombies[0].pid)
        eventually(lambda: first.status() == psutil.STATUS_STOPPED, within_s=120)
        zombies[1].send_signal(signal.SIGSTOP)
        assert [(m.step, m.generation) for m in manifests(folder / "far")] == [(4, 1)]
        heir = crash("fsdp", folder, 2, at=6, env={**env, "SAVE_EVERY": "1", "SNAPSHOT_EVERY": "0"})
        assert "resumed at step 4 from NVME" in heir.output
        assert [(m.step, m.generation) for m in manifests(folder / "far")] == [(5, 2), (4, 1)]
        for process in zombies:
            process.send_signal(signal.SIGCONT)
        stale = ended(zombies)
    assert 0 not in stale.codes
    assert -signal.SIGKILL not in stale.codes  # They have ended by themselves.
    for output in stale.outputs:
        assert "generation 2" in output, output
    shutil.rmtree(folder / "memory")
    last = finish("fsdp", folder, 2, env=env)
    assert last.resumed.startswith("resumed 5 from NVME"), last.output
    assert "step 8 in NVME: a superseded process published it" in last.resumed
    check_same(folder, undisturbed("fsdp", 2))
    check_audit(folder / "far")


def test_a_destination_that_is_full_for_one_rank_has_no_checkpoint(
    tmp_path: Path, undisturbed: Callable[..., Path]
) -> None:
    folder = tmp_path / "job"
    ended = finish("fsdp", folder, 2, env={"FULL": "1:4", "SETTLED": "1"})
    for rank, output in enumerate(ended.outputs):
        assert "No space left on device" in output, f"rank {rank}: {output}"
    assert "Rank 1 could not write its part" in ended.outputs[0]
    for name in ("near", "far"):
        steps = [manifest.step for manifest in manifests(folder / name)]
        assert steps[:2] == [12, 8]
        assert 4 not in steps
    check_same(folder, undisturbed("fsdp", 2))


def test_a_rank_that_fails_at_one_destination_keeps_no_other_waiting_at_the_next(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    for rank in (0, 1):
        env = {"FULL": f"{rank}:{4 * rank + 4}:near", "SETTLED": "1"}
        finish("fsdp", folder, 2, steps=4 * rank + 6, env=env)
    assert {manifest.step for manifest in manifests(folder / "near")} == {6, 10}
    assert {manifest.step for manifest in manifests(folder / "far")} >= {8, 10}


def test_where_one_part_is_too_large_no_rank_makes_a_snapshot(tmp_path: Path) -> None:
    env = {"SAVE_EVERY": "100", "SETTLED": "1"}
    crash("fsdp", tmp_path / "sizes", 2, at=4, env=env)
    sizes = [
        sum(entry[4] for entry in json.loads(found[0][1].with_name(MARK_NAME).read_text())["body"]["tensors"])
        for found in images(tmp_path / "sizes").values()
    ]
    assert max(sizes) > min(sizes) + 16
    limit = str(sum(sizes) // 2)
    crash("fsdp", tmp_path / "job", 2, at=4, env={**env, "LIMIT": limit})
    assert images(tmp_path / "job") == {}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_kills_leave_no_trace(tmp_path: Path, undisturbed: Callable[..., Path]) -> None:
    """At random moments: in a step, between two, while parts are copied or uploaded, while a start restores them."""
    steps = 200
    folder = tmp_path / "job"
    folder.mkdir()
    chance = random.Random(20)
    for _ in range(20):
        reached = reached_by(folder)
        with started("fsdp", folder, 2, steps=steps) as ranks:
            if chance.random() < 0.25:
                time.sleep(chance.uniform(1, 6))
            else:
                wanted = reached + chance.randint(0, 6)
                while not wanted < reached_by(folder) and all(rank.poll() is None for rank in ranks):
                    time.sleep(0.005)
                time.sleep(chance.uniform(0, 0.05))
            assert all(rank.poll() is None for rank in ranks), ended(ranks).output
            assert -signal.SIGKILL in kill_one(ranks, chance.choice(ranks)).codes
    assert reached_by(folder) < steps
    finish("fsdp", folder, 2, steps=steps)
    check_same(folder, undisturbed("fsdp", 2, steps))
    check_audit(folder / "near", steps)


def reached_by(folder: Path) -> int:
    return max(losses(folder), default=0) if (folder / "losses-0").exists() else 0
