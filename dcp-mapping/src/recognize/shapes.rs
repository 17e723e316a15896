//! Reads model facts from the shapes of a Megatron checkpoint.

use std::collections::HashMap;

use dcp_core::{CheckpointMetadata, Dims};

use crate::error::MappingError;
use crate::facts::{Facts, bad};
use crate::mapping::Mapping;

/// The shapes of a model's tensors without layer and expert, by names without numbers.
#[derive(Debug, Default)]
pub(crate) struct Shapes {
    shapes: HashMap<String, Dims>,
    layers: u64,
    experts: u64,
}

const LAYERS: &str = "decoder.layers.";
const EXPERTS: &str = "mlp.experts.experts.";
/// Facts that are the extent of an axis of a tensor.
const WIDTHS: &[(&str, &str, usize)] = &[
    ("hidden_size", "embedding.word_embeddings.weight", 1),
    ("ffn_hidden_size", "decoder.layers.mlp.linear_fc2.weight", 1),
    ("moe_ffn_hidden_size", "decoder.layers.mlp.experts.experts.linear_fc2.weight", 1),
    (
        "moe_shared_expert_intermediate_size",
        "decoder.layers.mlp.shared_experts.linear_fc2.weight",
        1,
    ),
    ("max_position_embeddings", "embedding.position_embeddings.weight", 0),
];

impl Shapes {
    /// Of a checkpoint under any of the prefixes of the mapping.
    pub(crate) fn of(metadata: &CheckpointMetadata, mapping: &Mapping) -> Self {
        let marked = |prefix: &&String| {
            let below = |name: &str| {
                name.strip_prefix(prefix.as_str())
                    .is_some_and(|rest| rest.starts_with(LAYERS) || rest.starts_with("embedding."))
            };
            metadata.iter().any(|(name, _)| below(name))
        };
        let prefixes = &mapping.family.megatron_prefixes;
        let prefix = prefixes.iter().find(marked).map_or("", String::as_str);
        let mut this = Self::default();
        for (name, entry) in metadata.iter() {
            if let (Some(name), Some(tensor)) = (name.strip_prefix(prefix), entry.as_tensor()) {
                this.add(name, &tensor.shape);
            }
        }
        this
    }

    fn add(&mut self, name: &str, shape: &Dims) {
        let mut shape: &[u64] = shape;
        let Some(rest) = name.strip_prefix(LAYERS) else {
            self.shapes.insert(name.to_owned(), shape.into());
            return;
        };
        let (layer, rest) = number(rest);
        match layer {
            Some(layer) => self.layers = self.layers.max(layer.saturating_add(1)),
            None => {
                let Some((layers, below)) = shape.split_first() else { return };
                self.layers = self.layers.max(*layers);
                shape = below;
            }
        }
        let mut key = rest.to_owned();
        if let Some((expert, name)) = expert(rest) {
            key = format!("{EXPERTS}{name}");
            match expert {
                Some(expert) => self.experts = self.experts.max(expert.saturating_add(1)),
                None => {
                    let Some((experts, below)) = shape.split_first() else { return };
                    self.experts = self.experts.max(*experts);
                    shape = below;
                }
            }
        }
        self.shapes.entry(format!("{LAYERS}{key}")).or_insert_with(|| shape.into());
    }

    /// The shape of a tensor by its name without numbers.
    pub(crate) fn get(&self, name: &str) -> Option<&[u64]> {
        self.shapes.get(name).map(|shape| &**shape)
    }

    /// Whether there is a tensor of a name without numbers, in any layer; a gated weight may be
    /// in two halves (`weight_w`, `weight_v`).
    pub(crate) fn has(&self, name: &str) -> bool {
        let halves = || self.shapes.contains_key(&format!("{name}_w"));
        self.shapes.contains_key(name) || halves()
    }

    /// The rows of the embedding, padding included.
    pub(crate) fn vocabulary(&self) -> Option<u64> {
        self.get("embedding.word_embeddings.weight")?.first().copied()
    }

    /// Whether the feed-forward network has a gate, where there is one.
    pub(crate) fn gated(&self) -> Option<bool> {
        let pair = |name: &str| {
            let up = *self.get(&format!("{LAYERS}{name}linear_fc1.weight"))?.first()?;
            let down = *self.get(&format!("{LAYERS}{name}linear_fc2.weight"))?.get(1)?;
            Some(up == down.checked_mul(2)?)
        };
        pair("mlp.").or_else(|| pair(EXPERTS)).or_else(|| {
            let name = format!("{LAYERS}mlp.linear_fc1.weight_w");
            (self.has(&name) || self.has(&format!("{LAYERS}{EXPERTS}linear_fc1.weight_w")))
                .then_some(true)
        })
    }

    /// Sets the facts that shapes have and arguments do not, and compares those that both have.
    pub(crate) fn complete(&self, facts: &mut Facts) -> Result<(), MappingError> {
        if let Some(rows) = self.vocabulary() {
            facts.doubt_vocabulary(rows)?;
        }
        let at = |name: &str, axis: usize| {
            self.get(&format!("{LAYERS}{name}")).and_then(|shape| shape.get(axis).copied())
        };
        for (name, tensor, axis) in WIDTHS {
            let len = self.get(tensor).and_then(|shape| shape.get(*axis).copied());
            if let (Some(len), Some(known)) = (len, facts.get_u64(name)?)
                && len != known
            {
                let problem = format!("{tensor} has {len} on its axis {axis}");
                return Err(bad(name, &known.into(), &problem));
            }
        }
        let mut complete = |name: &str, value: Option<u64>| {
            if let Some(value) = value {
                facts.complete(name, value);
            }
        };
        let embedding = self.get("embedding.word_embeddings.weight");
        complete("num_layers", (self.layers > 0).then_some(self.layers));
        complete("hidden_size", embedding.and_then(|shape| shape.get(1).copied()));
        complete("padded_vocab_size", self.vocabulary());
        complete("num_experts", (self.experts > 0).then_some(self.experts));
        complete("ffn_hidden_size", at("mlp.linear_fc2.weight", 1));
        complete("moe_ffn_hidden_size", at("mlp.experts.experts.linear_fc2.weight", 1));
        complete(
            "moe_shared_expert_intermediate_size",
            at("mlp.shared_experts.linear_fc2.weight", 1),
        );
        let positions = self.get("embedding.position_embeddings.weight");
        complete("max_position_embeddings", positions.and_then(|shape| shape.first().copied()));
        let kv_lora = at("self_attention.linear_kv_up_proj.weight", 1);
        complete("kv_lora_rank", kv_lora);
        let q_lora = at("self_attention.linear_q_up_proj.weight", 1);
        complete("q_lora_rank", q_lora);
        if kv_lora.is_some() {
            let rows = at("self_attention.linear_kv_down_proj.weight", 0);
            let rotary = rows.zip(kv_lora).and_then(|(rows, rank)| rows.checked_sub(rank));
            complete("qk_pos_emb_head_dim", rotary);
            return Ok(());
        }
        complete("kv_channels", at("self_attention.q_layernorm.weight", 0));
        let columns = at("self_attention.linear_proj.weight", 1);
        if let (None, Some(columns), Some(channels)) =
            (facts.get("num_attention_heads"), columns, facts.get_u64("kv_channels")?)
        {
            facts.complete("num_attention_heads", columns.checked_div(channels));
        }
        let Some(heads) = facts.get_u64("num_attention_heads")? else { return Ok(()) };
        let channels = columns.and_then(|columns| columns.checked_div(heads));
        if let Some(channels) = channels.filter(|channels| *channels > 0) {
            facts.complete("kv_channels", channels);
            let rows = at("self_attention.linear_qkv.weight", 0);
            let groups = rows.and_then(|rows| (rows / channels).checked_sub(heads));
            if let Some(groups) = groups.filter(|groups| *groups > 1) {
                facts.complete("num_query_groups", groups / 2);
            }
        }
        Ok(())
    }
}

/// The expert that a tensor of a layer is of, where its name says it, and its name in it. There are
/// experts in grouped tensors, one by one, and as several weights of one grouped layer.
fn expert(name: &str) -> Option<(Option<u64>, &str)> {
    if let Some(below) = name.strip_prefix(EXPERTS) {
        return Some(number(below));
    }
    if let Some(below) = name.strip_prefix("mlp.experts.local_experts.") {
        return Some(number(below)).filter(|(expert, _)| expert.is_some());
    }
    let below = name.strip_prefix("mlp.experts.").filter(|below| below.starts_with("linear_fc"))?;
    // The halves that Megatron-FSDP makes of a gated matrix.
    let (numbered, half) = match below.rsplit_once('_') {
        Some((numbered, "w")) => (numbered, Some("linear_fc1.weight_w")),
        Some((numbered, "v")) => (numbered, Some("linear_fc1.weight_v")),
        _ => (below, None),
    };
    let whole = numbered.trim_end_matches(|c: char| c.is_ascii_digit());
    let expert = numbered.get(whole.len()..)?.parse().ok()?;
    let name = match half {
        Some(half) => (whole == "linear_fc1.weight").then_some(half),
        None => whole.ends_with(".weight").then_some(whole),
    };
    Some((Some(expert), name?))
}

/// A number and the dot behind it, at the beginning of a name.
fn number(name: &str) -> (Option<u64>, &str) {
    match name.split_once('.') {
        Some((digits, rest)) if !digits.is_empty() => match digits.parse() {
            Ok(number) => (Some(number), rest),
            Err(_) => (None, name),
        },
        _ => (None, name),
    }
}
