//! Every family, there and back.

use dcp_jobs::Source;
use dcp_mapping::{
    Facts, LayerForm, LayerSpec, MapOptions, Mapped, Mapping, Padding, recognize_config,
};

use proptest::prelude::*;

use crate::model::{Mla, Model};
use crate::reference;
use crate::support::{checkpoint, contents, safetensors, to_hf_of, to_megatron_of};

const PADDING: Padding = Padding::Exactly(128);

fn to_megatron(model: &Model, source: &Source, options: &MapOptions) -> Mapped {
    let mapping = recognize_config(&model.config()).unwrap();
    let facts = mapping.facts_of_config(&model.config()).unwrap().with_padding(PADDING);
    let mapped = to_megatron_of(source, &mapping, &facts, options);
    mapped.unwrap_or_else(|error| panic!("{model:?}: {error}"))
}

fn to_hf(model: &Model, source: &Source, facts: &Facts) -> Mapped {
    let mapping = Mapping::builtin(model.family).unwrap();
    let mapped = to_hf_of(source, &mapping, facts, &MapOptions::default());
    mapped.unwrap_or_else(|error| panic!("{model:?}: {error}"))
}

#[test]
fn every_element_is_where_the_reference_has_it() {
    for model in Model::all() {
        let hf = model.tensors();
        let source = safetensors(&hf);
        let mapped = to_megatron(&model, &source, &MapOptions::default());
        let expected = reference::megatron(&model, &hf, 128);
        let found = contents(&mapped.source);
        let names = |of: &crate::support::Tensors| of.keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(&found), names(&expected), "{model:?}");
        for (name, tensor) in &expected {
            assert!(found[name] == *tensor, "{name} of {model:?}");
        }
    }
}

#[test]
fn there_and_back_every_bit_is_the_same() {
    for model in Model::all() {
        let hf = model.tensors();
        let source = safetensors(&hf);
        for (layers, spec) in [
            (LayerForm::Auto, LayerSpec::TransformerEngine),
            (LayerForm::PerLayer, LayerSpec::TransformerEngine),
            (LayerForm::Auto, LayerSpec::Local),
        ] {
            let mut options = MapOptions::default();
            (options.layers, options.spec) = (layers, spec);
            let mapped = to_megatron(&model, &source, &options);
            let stored = checkpoint(&mapped.source, 3);
            let back = to_hf(&model, &stored, &mapped.facts);
            assert!(contents(&back.source) == hf, "{model:?}");
            let trimmed = usize::from(model.vocab < 128) * if model.tied { 1 } else { 2 };
            assert_eq!(back.report.trimmed.len(), trimmed, "{model:?}");
            assert_eq!(back.report.tied, model.tied);
        }
    }
}

/// Models of any size, of families that have all operations between them.
fn model() -> impl Strategy<Value = Model> {
    let sizes = (1..4_usize, 1..6_usize, 1..6_usize, 1..4_usize, 1..4_usize, 1..4_usize);
    let more = (1..20_usize, 1..4_usize, 0..3_usize, any::<bool>());
    let family = prop::sample::select(vec!["qwen2", "qwen3_moe", "deepseek_v3", "gpt2"]);
    (sizes, more, family).prop_map(|(sizes, more, family)| {
        let (layers, hidden, ffn, groups, per_group, head) = sizes;
        let (vocab, experts, dense_layers, tied) = more;
        let heads = groups * per_group;
        let model =
            Model { layers, hidden, ffn, heads, groups, head, vocab, tied, ..Model::dense(family) };
        let moe = Model {
            experts,
            expert_ffn: ffn + 1,
            dense_layers: dense_layers.min(layers - 1),
            ..model.clone()
        };
        match family {
            "qwen2" => Model { qkv_bias: true, ..model },
            "qwen3_moe" => Model { qk_norm: true, ..moe },
            "gpt2" => {
                Model { tied: true, groups: heads, hidden: heads * head, positions: 3, ..model }
            }
            _ => {
                let mla = Mla { q_lora: head, kv_lora: ffn, nope: groups, rope: 2, value: head };
                let (groups, mtp) = (heads, usize::from(tied));
                let vocab = vocab.max(2);
                Model {
                    groups,
                    mtp,
                    vocab,
                    shared_experts: 1,
                    router_bias: true,
                    mla: Some(mla),
                    ..moe
                }
            }
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn models_of_any_size(model in model(), ranks in 1_u32..4) {
        let hf = model.tensors();
        let mapped = to_megatron(&model, &safetensors(&hf), &MapOptions::default());
        prop_assert!(contents(&mapped.source) == reference::megatron(&model, &hf, 128));
        let stored = checkpoint(&mapped.source, ranks);
        let back = to_hf(&model, &stored, &mapped.facts);
        prop_assert!(contents(&back.source) == hf);
    }
}
