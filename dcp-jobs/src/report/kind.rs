//! Infers part, layer and rank from names.

use super::Part;

/// The names under which trainers store optimizer state.
const OPTIMIZERS: [&str; 7] = [
    "optim",
    "opt",
    "optimizer",
    "optimizers",
    "optim_state",
    "optimizer_state",
    "optimizer_states",
];
/// The names of optimizer tensors, which Megatron-Core and others append to the parameter's name.
const MOMENTS: [&str; 6] =
    ["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "master_param"];
/// The names that precede a layer's number.
const LAYERS: [&str; 10] = [
    "layers",
    "layer",
    "blocks",
    "block",
    "h",
    "resblocks",
    "transformer_blocks",
    "single_transformer_blocks",
    "decoder_layers",
    "encoder_layers",
];

/// The part to which a tensor of this name belongs.
pub(super) fn part(fqn: &str) -> Part {
    let mut steps = fqn.split('.');
    let outer = steps.by_ref().take(2).any(|step| OPTIMIZERS.contains(&step));
    if outer || fqn.split('.').any(|step| MOMENTS.contains(&step)) {
        Part::Optimizer
    } else {
        Part::Model
    }
}

/// The list of layers that contains the name, and the number of the layer. The list is named after
/// its last two steps, so that a parameter and its optimizer state share it.
pub(super) fn layer(fqn: &str) -> Option<(String, u64)> {
    let mut before = None;
    let mut steps = fqn.split('.').peekable();
    while let Some(step) = steps.next() {
        let number = steps.peek().filter(|next| next.bytes().all(|b| b.is_ascii_digit()));
        if LAYERS.contains(&step)
            && let Some(number) = number.and_then(|number| number.parse().ok())
        {
            let stack = match before {
                Some(before) => format!("{before}.{step}"),
                None => step.to_owned(),
            };
            return Some((stack, number));
        }
        before = Some(step);
    }
    None
}

/// The rank that wrote a file: `__{rank}_{n}.distcp` of PyTorch's writers, `shard-{rank + 1}-…` of
/// its Hugging Face writer, `rank{rank}.…` of trainers.
pub(super) fn rank(file: &str) -> Option<u64> {
    let name = file.rsplit('/').next()?;
    let number = |digits: &str| {
        let plain = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
        digits.parse::<u64>().ok().filter(|_| plain)
    };
    if let Some(rest) = name.strip_prefix("__") {
        return number(rest.split_once('_')?.0);
    }
    if let Some(rest) = name.strip_prefix("shard-") {
        return number(rest.split_once('-')?.0)?.checked_sub(1);
    }
    number(name.strip_prefix("rank")?.split_once('.')?.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_of_files() {
        for (file, expected) in [
            ("__0_0.distcp", Some(0)),
            ("__12_3.g4.distcp", Some(12)),
            ("train/rank7.pt", Some(7)),
            ("shard-00003-model-00001-of-00002.safetensors", Some(2)),
            ("shard-00000-model-00001-of-00002.safetensors", None),
            ("model-00001-of-00002.safetensors", None),
            ("__+1_0.distcp", None),
            ("__99999999999999999999_0.distcp", None),
            ("ranking.pt", None),
            ("", None),
        ] {
            assert_eq!(rank(file), expected, "{file}");
        }
    }

    #[test]
    fn parts_and_layers_of_names() {
        let own = |name: &str| (part(name), layer(name));
        let layer = |stack: &str, number| Some((stack.to_owned(), number));
        for (name, expected) in [
            ("model.layers.3.norm.weight", (Part::Model, layer("model.layers", 3))),
            (
                "optimizer.state.model.layers.3.norm.weight.exp_avg",
                (Part::Optimizer, layer("model.layers", 3)),
            ),
            ("optim.exp_avg.transformer.h.11.w", (Part::Optimizer, layer("transformer.h", 11))),
            ("layers.0.w", (Part::Model, layer("layers", 0))),
            ("module.decoder.w.exp_avg_sq", (Part::Optimizer, None)),
            ("model.optimizer_embedding.weight", (Part::Model, None)),
            ("layers.norm", (Part::Model, None)),
            ("layers.99999999999999999999.w", (Part::Model, None)),
            ("", (Part::Model, None)),
        ] {
            assert_eq!(own(name), expected, "{name}");
        }
    }
}
