"""The families of dcp-mapping against the configurations of transformers.

interop_families.py DIR   what the TOML files in DIR say that transformers takes for a field which config.json
                          lacks is what it takes, and no such field of theirs is left out"""
import os
import tomllib
from dataclasses import MISSING, fields

os.environ.update(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1")

import interop_common as common

# Fields that a family speaks of by something else than its table of fields.
SPOKEN = {
    "window": lambda window: ["sliding_window"],
    "gelu": lambda field: [field],
    "rope": lambda rope: ["rope_theta"],
    "moe_layers": {"qwen": ["decoder_sparse_step"], "deepseek": ["n_shared_experts"]}.get,
}
# Fields that no model can be loaded with unless they are as in the tensors.
TOLD_BY_TENSORS = set("""decoder_sparse_step first_k_dense_replace hidden_size intermediate_size kv_lora_rank moe_intermediate_size
n_embd n_layer n_routed_experts n_shared_experts num_experts num_hidden_layers num_local_experts num_nextn_predict_layers q_lora_rank
qk_rope_head_dim vocab_size""".split())


def defaults(kind):
    """What an empty config.json means: field, by every name that it has, to value."""
    found = {}
    for field in fields(kind):
        value = field.default if field.default_factory is MISSING else field.default_factory()
        if field.init and value is not MISSING:
            found[field.name] = value
    empty = kind()
    if getattr(empty, "rope_parameters", None):
        found["rope_theta"] = empty.rope_parameters["rope_theta"]
    for alias, name in kind.attribute_map.items():
        if name in found or alias in found:
            value = found.get(name, found.get(alias))
            found.setdefault(name, value)
            found.setdefault(alias, value)
    return found


def check_family(path):
    from transformers import CONFIG_MAPPING

    with open(path, "rb") as file:
        family = tomllib.load(file)
    config, wrong = family["config"], []
    absent = config.get("absent", {})
    spoken = set(config["fields"])
    for name, of in SPOKEN.items():
        spoken.update(of(config[name]) if config.get(name) else [])
    # A family of another program than transformers is written as one of its models.
    for kind in family["family"].get("model_types") or [config["constants"]["model_type"]]:
        known = defaults(CONFIG_MAPPING[kind])
        # A field that every model of the family has with one value may be missing only if that is it.
        for field, value in {**config["constants"], **absent}.items():
            if field in known and field != "architectures" and known[field] != value:
                wrong.append("%s: an absent %s is %r, not %r" % (kind, field, known[field], value))
        for field in sorted(set(absent) - set(known)):
            wrong.append("%s: there is no %s" % (kind, field))
        # Where several fields are one argument, the first one counts.
        counted = {argument: field for field, argument in reversed(config["fields"].items())}
        idle = set(config["fields"]) - set(counted.values())
        for field in sorted(spoken - set(absent) - TOLD_BY_TENSORS - idle):
            if known.get(field) is not None:
                wrong.append("%s: an absent %s is %r, which is not said" % (kind, field, known[field]))
    return wrong


def main(folder):
    wrong = [line for name in sorted(os.listdir(folder)) if name.endswith(".toml") for line in check_family(os.path.join(folder, name))]
    assert not wrong, "\n".join(["fields that config.json lacks are something else in transformers:", *wrong])
    print("%d families: absent fields are what transformers takes" % len(os.listdir(folder)))


if __name__ == "__main__":
    common.main(main)
