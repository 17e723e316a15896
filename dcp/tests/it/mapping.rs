//! A model of transformers as a checkpoint of Megatron-Core that several ranks could have saved,
//! and back by nothing but what is in it.

use std::collections::BTreeMap;
use std::sync::Arc;

use dcp::core::storage::{PutMode, StorageExt};
use dcp::core::{DType, Storage};
use dcp::formats::safetensors::{Header, SafetensorsItem, encode_header, header_len};
use dcp::fs::FsStorage;
use dcp::jobs::convert::to_safetensors;
use dcp::jobs::write::Target;
use dcp::jobs::{JobOptions, Source};
use dcp::mapping::{
    Facts, MapOptions, Mapping, Recognition, map_to_hf, map_to_megatron, recognize,
    recognize_config,
};
use dcp::megatron::jobs::to_torch_dist;
use dcp::megatron::partition::ParallelLayout;
use dcp::megatron::{MegatronCheckpoint, MegatronOpenOptions, MegatronWriter};
use dcp_testing::key;
use serde_json::{Value, json};

type Tensors = BTreeMap<String, (Vec<u64>, Vec<u8>)>;

/// Tensors of those shapes in which every element is another one.
fn tensors(shapes: Vec<(String, Vec<u64>)>) -> Tensors {
    let mut next = 0_u32;
    let mut all = Tensors::new();
    for (name, shape) in shapes {
        let count = shape.iter().product::<u64>();
        let bytes = (0..count).flat_map(|_| {
            next += 1;
            next.to_le_bytes()
        });
        all.insert(name, (shape, bytes.collect()));
    }
    all
}

async fn written(storage: &Arc<dyn Storage>, tensors: &Tensors) -> Source {
    let items: Vec<_> = tensors
        .iter()
        .map(|(name, (shape, _))| SafetensorsItem {
            name: name.as_str().into(),
            dtype: DType::Float32,
            shape: shape.as_slice().into(),
        })
        .collect();
    let header = encode_header(&items, &Default::default()).unwrap();
    let mut bytes = header.bytes.to_vec();
    for index in header.order {
        bytes.extend_from_slice(&tensors[&*items[index].name].1);
    }
    storage.put(&key("in.safetensors"), bytes.into(), PutMode::Create).await.unwrap();
    Source::safetensors(Arc::clone(storage), key("in.safetensors"))
}

async fn contents(source: &Source, storage: &Arc<dyn Storage>) -> Tensors {
    let target = Target::new(Arc::clone(storage), key("out.safetensors"));
    to_safetensors(source, &target, &JobOptions::default()).await.unwrap();
    let bytes = storage.read_all(&key("out.safetensors")).await.unwrap();
    let len = usize::try_from(header_len(&bytes, bytes.len() as u64).unwrap()).unwrap();
    let (json, data) = bytes[8..].split_at(len);
    let header = Header::parse(json, data.len() as u64).unwrap();
    let all = header.tensors().map(|(name, info)| {
        let range = info.byte_range.start as usize..info.byte_range.end as usize;
        (name.to_string(), (info.shape.to_vec(), data[range].to_vec()))
    });
    all.collect()
}

/// A model in the manner of DeepSeek-V3 with one layer without experts, or of Mixtral.
fn model(latent: bool) -> (Value, Tensors) {
    let mut all = vec![
        ("model.embed_tokens.weight".to_owned(), vec![50, 16]),
        ("model.norm.weight".to_owned(), vec![16]),
        ("lm_head.weight".to_owned(), vec![50, 16]),
    ];
    for layer in 0..4 {
        let mut add = |name: &str, shape: &[u64]| {
            all.push((format!("model.layers.{layer}.{name}"), shape.to_vec()));
        };
        add("input_layernorm.weight", &[16]);
        add("post_attention_layernorm.weight", &[16]);
        add("self_attn.o_proj.weight", &[16, 16]);
        if !latent {
            add("self_attn.q_proj.weight", &[16, 16]);
            add("self_attn.k_proj.weight", &[8, 16]);
            add("self_attn.v_proj.weight", &[8, 16]);
            add("block_sparse_moe.gate.weight", &[4, 16]);
            for expert in 0..4 {
                let name = |w| format!("block_sparse_moe.experts.{expert}.{w}.weight");
                add(&name("w1"), &[12, 16]);
                add(&name("w3"), &[12, 16]);
                add(&name("w2"), &[16, 12]);
            }
            continue;
        }
        add("self_attn.q_proj.weight", &[24, 16]);
        add("self_attn.kv_a_proj_with_mqa.weight", &[10, 16]);
        add("self_attn.kv_a_layernorm.weight", &[8]);
        add("self_attn.kv_b_proj.weight", &[32, 8]);
        let mut mlp = |name: &str, size: u64| {
            add(&format!("{name}.gate_proj.weight"), &[size, 16]);
            add(&format!("{name}.up_proj.weight"), &[size, 16]);
            add(&format!("{name}.down_proj.weight"), &[16, size]);
        };
        if layer == 0 {
            mlp("mlp", 20);
            continue;
        }
        mlp("mlp.shared_experts", 12);
        (0..4).for_each(|expert| mlp(&format!("mlp.experts.{expert}"), 12));
        add("mlp.gate.weight", &[4, 16]);
        add("mlp.gate.e_score_correction_bias", &[4]);
    }
    let mut config = json!({
        "model_type": "mixtral", "num_hidden_layers": 4, "hidden_size": 16, "vocab_size": 50,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4,
        "intermediate_size": 12, "num_experts_per_tok": 2, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": false, "rope_theta": 500_000.0,
    });
    if latent {
        config = json!({
            "model_type": "deepseek_v3", "num_hidden_layers": 4, "hidden_size": 16,
            "vocab_size": 50, "num_attention_heads": 4, "intermediate_size": 20,
            "moe_intermediate_size": 12, "n_shared_experts": 1, "n_routed_experts": 4,
            "first_k_dense_replace": 1, "kv_lora_rank": 8, "qk_nope_head_dim": 4,
            "qk_rope_head_dim": 2, "v_head_dim": 4, "num_experts_per_tok": 2,
            "tie_word_embeddings": false, "rope_theta": 500_000.0,
            "n_group": 1, "topk_group": 1,
        });
    }
    (config, tensors(all))
}

#[test]
fn there_and_back_through_a_checkpoint_of_several_ranks() {
    for (latent, layout) in [
        (false, ParallelLayout::new(2, 2)),
        (false, ParallelLayout::new(1, 1).with_ep(2).with_dp(2)),
        (true, ParallelLayout::new(2, 2)),
        (true, ParallelLayout::new(1, 2).with_ep(4).with_dp(4)),
    ] {
        dcp_testing::block_on(there_and_back(latent, layout));
    }
}

async fn there_and_back(latent: bool, layout: ParallelLayout) {
    let folder = tempfile::tempdir().unwrap();
    let place = |name: &str| -> Arc<dyn Storage> {
        Arc::new(FsStorage::builder(folder.path().join(name)).create(true).open().unwrap())
    };
    let (hf, megatron) = (place("hf"), place("megatron"));
    let (config, expected) = model(latent);
    let (job, options) = (JobOptions::default(), MapOptions::default());
    let mapping = recognize_config(&config).unwrap();
    let facts = mapping.facts_of_config(&config).unwrap();
    let source = written(&hf, &expected).await;
    let there = map_to_megatron(&source, &mapping, &facts, &options, &job).await.unwrap();
    let writer = MegatronWriter::builder(Arc::clone(&megatron));
    to_torch_dist(&there.source, writer, layout, &job).await.unwrap();

    let opened =
        MegatronCheckpoint::open(&megatron, &MegatronOpenOptions::default()).await.unwrap();
    let args = opened.args().unwrap();
    assert_eq!((args.num_layers(), args.num_experts()), (Some(4), Some(4)));
    assert_eq!((args.vocab_size(), args.padded_vocab_size()), (Some(50), Some(128)));
    let facts = Facts::from_dict(args.dict());
    let metadata = opened.source().metadata().await.unwrap();
    let Recognition::Found { family, .. } = recognize(&metadata, &facts).unwrap() else { panic!() };
    let mapping = Mapping::builtin(&family).unwrap();
    let back = map_to_hf(opened.source(), &mapping, &facts, &options, &job).await.unwrap();
    assert!(contents(&back.source, &hf).await == expected, "{family} {layout:?}");
    let again = mapping.config_json(&back.facts).unwrap();
    for (field, value) in config.as_object().unwrap() {
        assert_eq!(again[field], *value, "{field}");
    }
}
