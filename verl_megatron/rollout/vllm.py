import os, sys
sys.path.insert(0, "/work/shared/proofs/vllm_cpu")
import torch, torch.distributed as dist
class VLLMActor:
    def __init__(self, model, tp=1, *, config=None, max_model_len=None, dtype="auto", seed=0, load_weights=True):
        for k, v in dict(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1").items(): os.environ.setdefault(k, v)
        from vcpu_engine import make_llm, model_of
        rng = torch.get_rng_state()
        self.tp = tp; self.rank = dist.get_rank(); self.world = dist.get_world_size()
        self.llm = make_llm(model, tp=tp, load_format="auto" if load_weights else "dummy", kv_cache_memory_bytes=64<<20, max_num_seqs=config.max_num_seqs, max_model_len=max_model_len, enable_prefix_caching=True, logprobs_mode="processed_logprobs")
        torch.set_rng_state(rng); self.model = model_of(self.llm)
    @property
    def is_home(self): return self.rank % self.tp == 0
    def parameters(self): return {n: p.data for n, p in self.model.named_parameters()}
    def generate(self, requests, sampling, on_finish=None):
        from vllm import SamplingParams
        n = self.world // self.tp; mine = requests[self.rank // self.tp::n]
        with torch.random.fork_rng(devices=[]):
            outs = self.llm.generate([{"prompt_token_ids": list(r.prompt_token_ids)} for r in mine], [SamplingParams(temperature=sampling.temperature, seed=r.seed, max_tokens=sampling.max_tokens, logprobs=0, detokenize=False) for r in mine], use_tqdm=False)
        res = []
        for r, o in zip(mine, outs):
            c = o.outputs[0]
            res.append(Generation(r.row_id, r.prompt_token_ids, list(c.token_ids), [next(iter(d.values())).logprob for d in c.logprobs], c.finish_reason))
            if on_finish: on_finish(res[-1])
        return res
    def sleep(self): pass
    def wake_weights(self): pass
    def wake_kv_cache(self): pass
    def reset_prefix_cache(self): assert self.llm.reset_prefix_cache()
    def close(self): pass
from verl_megatron.rollout.sampling import Generation
