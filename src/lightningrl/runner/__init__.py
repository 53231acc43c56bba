"""Runs an unmodified agent: it sees a base URL and a key, nothing else of LightningRL.

dispatch      claims attempts and finishes them (see `leases`)
pool          picks a worker for each attempt and replaces the broken ones; `process` is one worker, seen from outside
worker        the process that calls the agent and the reward function; `wire` is what both sides send
boundary      calls user code; `command` runs an agent that is a program
attach        tells apart the calls of attempts that share a worker
printed       marks what an attempt prints, so that it can be found in agents.log
watchdog, exhaustion, leftovers     what protects attempts from each other
remote        claims attempts from a server on another machine; `relay` answers agents there; `remote_worker` joins both
tool_playback, tool_hooks, replayed     play recorded tool results back in branches; `asking` asks the gateway
environment   the variables that an agent gets
"""

from lightningrl.leases import Outcome
from lightningrl.runner.base import Runner

__all__ = ["Outcome", "Runner"]
