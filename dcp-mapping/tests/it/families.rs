//! Every family, there and back.

use dcp_convert::Source;
use dcp_mapping::{
    Facts, LayerForm, LayerSpec, MapOptions, Mapped, Mapping, Padding, recognize_config,
};

use crate::model::Model;
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

/// The arguments that a Megatron checkpoint made here carries.
fn args(mapped: &Mapped) -> Facts {
    mapped.facts.clone()
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
            let back = to_hf(&model, &stored, &args(&mapped));
            assert!(contents(&back.source) == hf, "{model:?}");
            let trimmed = usize::from(model.vocab < 128) * if model.tied { 1 } else { 2 };
            assert_eq!(back.report.trimmed.len(), trimmed, "{model:?}");
            assert_eq!(back.report.tied, model.tied);
        }
    }
}
