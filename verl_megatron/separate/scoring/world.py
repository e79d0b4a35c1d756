"""The ranks of a scoring world: its frozen models, and training's jobs over one bridge after the other."""

from collections.abc import Callable
from dataclasses import replace

from parallel.bridge import Bridge, BridgeLostError, together
from parallel.groups import ProcessGroups
from parallel.rank_set import agree
from parallel.sealed_store import open_store
from parallel.weights.architecture import read_architecture
from verl_megatron.checks.folders import Roles, find_not_finite
from verl_megatron.checks.problems import refuse
from verl_megatron.config import TrainerConfig
from verl_megatron.lifecycle.agreement import agreed_by_worlds
from verl_megatron.model_specs import layout_of, models_of_world, num_training_ranks
from verl_megatron.roles.compute import compute_of
from verl_megatron.roles.engine import EngineOptions
from verl_megatron.roles.role import Role, make_role
from verl_megatron.separate.scoring.server import ScoringServer
from verl_megatron.separate.world import ServingRanks


class ScoringWorld(ServingRanks[dict[str, Role]]):
    """The ranks of frozen models with devices of their own; arguments and errors as of `ServingRanks`."""

    def __init__(self, config: TrainerConfig, role: str):
        super().__init__(config, role, vllm=False)

    def _build(self, beat: Callable[[], None]) -> dict[str, Role]:
        config, own, self._beat = self.config, self.world, beat
        specs = models_of_world(config, self.own)
        folders: Roles = {spec.name: (spec.model.path, spec.head) for spec in specs}
        dtypes = [compute_of(config.engine).dtype]
        agree(lambda: refuse(find_not_finite(folders, dtypes, place=own.rank, of=own.size)), own)
        options = EngineOptions(
            config=config.engine,
            seed=config.run.seed,
            temperature=config.rollout.temperature,
            progress=beat,
        )
        return {
            spec.name: make_role(
                spec.model,
                ProcessGroups(layout_of(spec.model, own.size), own),
                arch=read_architecture(spec.model.path),
                head=spec.head,
                options=replace(options, fp8_weights_by=spec.fp8_weights_by),
            )
            for spec in specs
        }

    def _serve_over_one_bridge(self, parts: dict[str, Role]) -> bool:
        try:
            bridge = together(self.world, self._join)
        except BridgeLostError:
            return False
        try:
            self.activity.answers(bridge)
            ScoringServer(self.world, parts, bridge, beat=self._beat, activity=self.activity).serve()
            bridge.leave()
        except BridgeLostError as error:
            self._say_lost(error)
            bridge.abandon()
            return False
        return True

    def _join(self) -> Bridge:
        bridge = Bridge.join(
            self.world,
            open_store(self.world, wait=self._beat),
            self.own.name,
            num_other=num_training_ranks(self.config),
            wait=self._beat,
        )
        with bridge.abandoned_if_lost():
            bridge.agree_on(agreed_by_worlds(self.config))
        return bridge
