//! A mapping of a model with very many tensors is planned in no time.

use std::sync::Arc;

use async_trait::async_trait;
use dcp_conformance::MemoryStorage;
use dcp_core::checkpoint::{DataSink, ReadReport};
use dcp_core::metadata::{Encoding, Entry, Layout, Placement, TensorEntry};
use dcp_core::plan::LoadPlan;
use dcp_core::{CheckpointError, CheckpointMetadata, DType, Key, StorageReader};
use dcp_jobs::Source;
use dcp_mapping::{MapOptions, Mapping};
use serde_json::json;

use crate::support::{block_on, to_hf_of, to_megatron_of};

/// An index without a checkpoint.
#[derive(Debug)]
struct Index(Arc<CheckpointMetadata>);

#[async_trait]
impl StorageReader for Index {
    async fn metadata(&self) -> Result<Arc<CheckpointMetadata>, CheckpointError> {
        Ok(Arc::clone(&self.0))
    }

    async fn read(
        &self,
        _: &Arc<CheckpointMetadata>,
        _: &LoadPlan,
        _: Arc<dyn DataSink>,
    ) -> Result<ReadReport, CheckpointError> {
        panic!("nothing is read")
    }
}

fn source(tensors: impl Iterator<Item = (String, Vec<u64>)>) -> Source {
    let mut metadata = CheckpointMetadata::new();
    let file = metadata.intern_file(&Key::new("model").unwrap()).unwrap();
    let encoding = metadata.intern_encoding(&Encoding::new(Layout::Raw)).unwrap();
    let mut byte_offset = 0;
    for (name, shape) in tensors {
        let mut tensor = TensorEntry::new(DType::BFloat16, shape.as_slice());
        let byte_len = tensor.byte_len().unwrap();
        let placement = Placement { file, encoding, byte_offset, byte_len };
        tensor.chunks.push(&vec![0; shape.len()], &shape, Some(placement)).unwrap();
        byte_offset += byte_len;
        metadata.insert(name, Entry::Tensor(tensor));
    }
    Source::new(Arc::new(MemoryStorage::new()), Arc::new(Index(Arc::new(metadata))))
}

#[test]
fn a_model_of_94_layers_with_128_experts_each() {
    let (layers, experts, hidden, ffn, heads, head) = (94, 128, 4096, 1536, 64, 128);
    let mut all = vec![("model.norm.weight".to_owned(), vec![hidden])];
    for name in ["model.embed_tokens.weight", "lm_head.weight"] {
        all.push((name.to_owned(), vec![151_936, hidden]));
    }
    for layer in 0..layers {
        let mut add = |name: &str, shape: &[u64]| {
            all.push((format!("model.layers.{layer}.{name}.weight"), shape.to_vec()));
        };
        add("input_layernorm", &[hidden]);
        add("post_attention_layernorm", &[hidden]);
        add("self_attn.q_proj", &[heads * head, hidden]);
        add("self_attn.k_proj", &[4 * head, hidden]);
        add("self_attn.v_proj", &[4 * head, hidden]);
        add("self_attn.o_proj", &[hidden, heads * head]);
        add("self_attn.q_norm", &[head]);
        add("self_attn.k_norm", &[head]);
        add("mlp.gate", &[experts, hidden]);
        for expert in 0..experts {
            add(&format!("mlp.experts.{expert}.gate_proj"), &[ffn, hidden]);
            add(&format!("mlp.experts.{expert}.up_proj"), &[ffn, hidden]);
            add(&format!("mlp.experts.{expert}.down_proj"), &[hidden, ffn]);
        }
    }
    let count = all.len();
    let mapping = Mapping::builtin("qwen3_moe").unwrap();
    let config = json!({
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 4,
        "head_dim": head, "hidden_size": hidden, "num_experts": experts,
    });
    let facts = mapping.facts_of_config(&config).unwrap();
    let hf = source(all.into_iter());
    let options = MapOptions::default();
    let there = to_megatron_of(&hf, &mapping, &facts, &options).unwrap();
    assert_eq!(there.report.created.len(), 3 + 9);
    let experts = "decoder.layers.mlp.experts.experts.linear_fc1.weight";
    let metadata = block_on(there.source.metadata()).unwrap();
    let shape = &metadata.get(experts).unwrap().as_tensor().unwrap().shape;
    assert_eq!(**shape, [94, 128, 2 * ffn, hidden]);
    let back = to_hf_of(&there.source, &mapping, &there.facts, &options).unwrap();
    assert_eq!(back.report.created.len(), count);
}
