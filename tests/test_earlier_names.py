"""Names of earlier versions lead to what they are called today."""

from __future__ import annotations

from importlib import import_module

import pytest

from strata.checkpoint import CheckpointInfo
from strata.core.messages import CheckpointId

TODAY = {
    "elastic_harness.agent.elastic_agent:WorldInfo": "strata.trainer.distributed:WorldInfo",
    "elastic_harness.checkpoint.config:CheckpointConfig": "elastic_harness.checkpoint:CheckpointConfig",
    "elastic_harness.checkpoint.config:CheckpointTier": "elastic_harness.checkpoint:CheckpointTier",
    "elastic_harness.config_validator:Key": "strata.trainer.validation:Key",
    "elastic_harness.config_validator:Kind": "strata.trainer.validation:Kind",
    "elastic_harness.scaling.lr_scaling:ScalingConfig": "strata.trainer.scaling:ScalingConfig",
    "elastic_harness.sequences:SequenceDataset": "strata.trainer.data:SequenceDataset",
    "elastic_harness.sync:SyncTimer": "strata.trainer.sync:SyncTimer",
    "strata.client:Answered": "strata.client:ApiError",
    "strata.rendezvous:SECONDS_NOT_MINUTES": "strata.rendezvous:FAST_RECOVERY",
}


def look_up(name: str) -> object:
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


@pytest.mark.parametrize("name", TODAY)
def test_an_earlier_name_is_the_one_of_today(name: str) -> None:
    assert look_up(name) is look_up(TODAY[name])


def test_a_checkpoint_keeps_the_earlier_name_of_its_durable_parent() -> None:
    info = CheckpointInfo(
        checkpoint_id=CheckpointId("b"),
        step=2,
        epoch=0,
        path="/b",
        size_bytes=1,
        created_at=0.0,
        digest="",
        tiers=("NVME",),
        durable_parent=CheckpointId("a"),
    )
    assert info.lasting_parent == "a"
