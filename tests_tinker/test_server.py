"""The tests' own server: it answers, it dies, and it leaves nothing."""

import os
import shutil

import numpy as np
import pytest

from lightningrl.config import LossConfig, ServiceConfig, TrainerConfig
from lightningrl.data.forest import build_forest
from lightningrl.hosted.adapters import RemotePolicy
from lightningrl.hosted.service import Service, ServiceError
from lightningrl.trainer.tinker import TinkerTrainer
from tests_tinker.server import NEAR, Server
from tests_tinker.test_faults import taught


def test_a_killed_server_goes_on_with_its_checkpoints_and_not_without(own_server: Server) -> None:
    service = Service(ServiceConfig(url=own_server.url, timeout_s=120))
    policy = RemotePolicy(service, base=str(own_server.model), rank=4, seed=0, near=NEAR)
    trainer = TinkerTrainer(policy, config=TrainerConfig(), loss=LossConfig(), tokenizer=None)
    trainer.forward_backward(build_forest(taught()))
    trainer.optim_step(learning_rate=0.05)
    saved = policy.describe(state=policy.save_state())
    service.close()
    process = own_server.process
    assert process is not None
    own_server.kill()
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    kept, away = own_server.folder / "kept", own_server.folder / "away"
    kept.rename(away)
    own_server.start()
    again = Service(ServiceConfig(url=own_server.url, timeout_s=120))
    with pytest.raises(ServiceError, match=f"did not continue from `{saved.state}`") as lost:
        RemotePolicy(again, base="", rank=4, seed=0, near=NEAR, begin=saved)
    assert lost.value.hint is not None
    shutil.rmtree(kept, ignore_errors=True)
    away.rename(kept)
    found = RemotePolicy(again, base="", rank=4, seed=0, near=NEAR, begin=saved)
    np.testing.assert_allclose(found.marks(), saved.marks, atol=NEAR)
    again.close()
