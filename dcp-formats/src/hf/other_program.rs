//! Folders of safetensors files that are no model of Hugging Face, although their names look like it.
//!
//! Each of them opens as a model without an error, and gives wrong weights: changes to a base model,
//! compressed bytes, the parts of one rank. They are recognized by the file that only their program
//! writes.

use dcp_core::format::Folder;

use super::ENDING;
use super::index_file::INDEX_NAME;
use super::layout::SINGLE_NAME;

/// Bytes of an index that are read to recognize a folder; writers put `metadata` in front.
pub(super) const INDEX_HEAD_BYTES: u64 = 4096;
/// The key of an index by which slime (at 624b824a) marks changes to the weights of an earlier version.
pub(super) const DELTA_KEY: &str = "delta_encoding";
/// The description of a folder with [`DELTA_KEY`], as the predicate of a sentence.
pub(super) const IS_DELTA: &str = "holds weight changes as slime publishes them (delta_encoding in the \
                                   index), not weights; apply them with slime, and read the folder \
                                   that it leaves";

/// The program whose folder this is, as the predicate of a sentence; `None` for a model.
pub(super) fn other_program(folder: &Folder<'_>) -> Option<&'static str> {
    let is_delta = || {
        let head = folder.peeked(INDEX_NAME)?;
        let key = format!("\"{DELTA_KEY}\"");
        Some(head.windows(key.len()).any(|window| window == key.as_bytes()))
    };
    if is_delta() == Some(true) {
        return Some(IS_DELTA);
    }
    let is_model = folder.has(SINGLE_NAME) || folder.has(INDEX_NAME);
    let is_adapter = |(name, _)| str::starts_with(name, "adapter_model.");
    if !is_model && folder.has("adapter_config.json") && folder.files().any(is_adapter) {
        return Some(
            "is an adapter of PEFT: changes to a base model, not a model; merge it with PEFT's \
             merge_and_unload and save the model, or open its adapter_model file alone",
        );
    }
    // torch_checkpointing 0.1: `model_0.safetensors` has the local tensors of rank 0, and only
    // metadata.pkl says of which part.
    let is_rank_file = |(name, _): (&str, _)| {
        let stem = name.strip_suffix(ENDING).and_then(|stem| stem.rsplit_once('_'));
        stem.is_some_and(|(_, rank)| !rank.is_empty() && rank.bytes().all(|b| b.is_ascii_digit()))
    };
    if !is_model && folder.has("metadata.pkl") && folder.files().any(is_rank_file) {
        return Some(
            "holds files of each rank as torch_checkpointing writes them (metadata.pkl), not a model; \
             load them with torch_checkpointing and save the state with torch.distributed.checkpoint",
        );
    }
    None
}
