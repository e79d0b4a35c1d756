"""Where a decoding step's time goes: the parts of vLLM's step in its process, then the GPU's kernels."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from torch.profiler import profile

from parallel import device
from verl_megatron.observe.profiling import described, make_profiler
from verl_megatron.rollout.vllm_decoding.bookkeeping import replaced

SETTLED = 8  # steps of decoding before the first one that counts
TIMED, PROFILED = 32, 16  # steps that are timed by part, and then profiled
WAIT, REST = "wait for the GPU", "the rest"


class StepProfile:
    """Times some decoding steps by part, and profiles the next ones.

    Generate in the context of `watching`. Profiling slows steps down, so no step is both timed and profiled.

    Args:
        engine: vLLM's LLMEngine of this process.
        prefill_steps: steps at the start that do not count.
    """

    def __init__(self, engine: Any, *, prefill_steps: int):
        self._engine, self._first = engine, prefill_steps + SETTLED
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._steps, self._began, self._whole_s = 0, 0.0, 0.0
        self._profiler: profile | None = None
        self._open = contextlib.ExitStack()

    @staticmethod
    def steps(prefill_steps: int) -> int:
        """Return the number of steps that a profile needs."""
        return prefill_steps + SETTLED + TIMED + PROFILED + 1

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Context in which the engine's steps count."""
        step = self._engine.step

        def counted() -> Any:
            self._before_step()
            return step()

        with replaced(self._engine, "step", counted):
            yield

    def _before_step(self) -> None:
        """Begin or end the timed or the profiled steps."""
        if self._steps == self._first:
            self._open.enter_context(self._timed_parts())
            self._began = time.perf_counter()
        elif self._steps == self._first + TIMED:
            self._whole_s = time.perf_counter() - self._began
            self._open.close()
            device.synchronize()
            self._profiler = make_profiler()
            self._profiler.start()
        elif self._profiler is not None and self._steps == self._first + TIMED + PROFILED:
            device.synchronize()
            self._profiler.stop()
        self._steps += 1

    def milliseconds(self) -> dict[str, float]:
        """Return the milliseconds of a timed step by part, in the order of the step."""
        parts = {part: 1e3 * self._seconds[part] / TIMED for part in (*self._calls(), WAIT)}
        whole = 1e3 * self._whole_s / TIMED
        return parts | {REST: whole - sum(parts.values()), "a step": whole}

    def kernels(self) -> str:
        """Return tables of the profiled steps' kernels and operators."""
        assert self._profiler is not None, "generation ended before its profile"
        return described(self._profiler)

    def _calls(self) -> dict[str, tuple[Any, str]]:
        """Return object and method of each part; they follow each other in a step."""
        core = self._engine.engine_core.engine_core
        return {
            "schedule": (core.scheduler, "schedule"),
            "launch the model": (core.model_executor, "execute_model"),
            "launch the sampler": (core.model_executor, "sample_tokens"),
            "take up the tokens": (core.scheduler, "update_from_output"),
            "output": (self._engine.output_processor, "process_outputs"),
        }

    @contextlib.contextmanager
    def _timed_parts(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for part, (owner, method) in self._calls().items():
                stack.enter_context(replaced(owner, method, self._timed(part, getattr(owner, method))))
            yield

    def _timed(self, part: str, call: Callable) -> Callable:
        def timed(*arguments: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            result = call(*arguments, **options)
            self._seconds[part] += time.perf_counter() - begin
            if part != WAIT and hasattr(result, "result"):  # a future
                result.result = self._timed(WAIT, result.result)
            return result

        return timed
