"""The tests' own server: it answers, it dies, and it leaves nothing."""

import os

import pytest

from lightningrl.config import ServiceConfig
from lightningrl.hosted.adapters import RemotePolicy
from lightningrl.hosted.service import Service
from tests_tinker.server import Server


def test_a_killed_server_starts_again_on_its_folder_and_still_has_its_checkpoints(own_server: Server) -> None:
    service = Service(ServiceConfig(url=own_server.url, timeout_s=120))
    policy = RemotePolicy(service, base=str(own_server.model), rank=4, seed=0)
    saved = policy.describe(state=policy.save_state(), sampler="")
    service.close()
    process = own_server.process
    assert process is not None
    own_server.kill()
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    own_server.start()
    again = Service(ServiceConfig(url=own_server.url, timeout_s=120))
    RemotePolicy(again, base="", rank=4, seed=0, begin=saved)
    again.close()
