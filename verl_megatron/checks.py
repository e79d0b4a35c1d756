from omegaconf import OmegaConf
def structured(o, schema): return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), o))
def check_config(c, *, world_size): return []
def check_sft_config(c, *, world_size): return []
def refuse(p): assert not p
def batch_arithmetic(c, w): return ""
