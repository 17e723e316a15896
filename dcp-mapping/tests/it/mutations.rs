//! Mappings with mistakes in them: refused or used, but never more than that.

use dcp_mapping::{Facts, MapOptions, Mapping, MappingError};
use proptest::prelude::*;

use crate::model::Model;
use crate::support::{safetensors, stored, to_hf_of, to_megatron_of};
use crate::targets;

fn family(name: &str) -> String {
    let families = concat!(env!("CARGO_MANIFEST_DIR"), "/families");
    std::fs::read_to_string(format!("{families}/{name}.toml")).unwrap()
}

#[derive(Clone, Debug)]
enum Mistake {
    Lost(usize),
    Twice(usize),
    Swapped(usize, usize),
    Cut(usize),
    Typed(usize, char),
}

fn mistake() -> impl Strategy<Value = Mistake> {
    let letter = prop::sample::select("{}[]\"=.,lq0\n#é".chars().collect::<Vec<_>>());
    prop_oneof![
        4 => any::<usize>().prop_map(Mistake::Lost),
        2 => any::<usize>().prop_map(Mistake::Twice),
        2 => (any::<usize>(), any::<usize>()).prop_map(|(a, b)| Mistake::Swapped(a, b)),
        1 => any::<usize>().prop_map(Mistake::Cut),
        4 => (any::<usize>(), letter).prop_map(|(at, letter)| Mistake::Typed(at, letter)),
    ]
}

fn make(text: &str, mistake: &Mistake) -> String {
    let mut lines: Vec<&str> = text.lines().collect();
    let count = lines.len().max(1);
    match *mistake {
        Mistake::Lost(at) if !lines.is_empty() => _ = lines.remove(at % count),
        Mistake::Twice(at) if !lines.is_empty() => lines.insert(at % count, lines[at % count]),
        Mistake::Swapped(a, b) if !lines.is_empty() => lines.swap(a % count, b % count),
        Mistake::Cut(at) => lines.truncate(at % count),
        Mistake::Typed(at, letter) => {
            let at = at % (text.chars().count() + 1);
            let mut letters: Vec<char> = text.chars().collect();
            letters.insert(at, letter);
            return letters.into_iter().collect();
        }
        _ => {}
    }
    lines.join("\n")
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn mistakes_do_no_harm(
        name in prop::sample::select(vec!["llama", "qwen3_moe", "gpt2"]),
        mistakes in prop::collection::vec(mistake(), 1..4),
    ) {
        let text = mistakes.iter().fold(family(name), |text, mistake| make(&text, mistake));
        targets::mapping(text.as_bytes());
        let mapping = match Mapping::parse(&text, "mine.toml") {
            Ok(mapping) => mapping,
            Err(MappingError::Declaration { line, .. }) => {
                prop_assert!((1..=text.lines().count().max(1) + 1).contains(&line));
                return Ok(());
            }
            Err(other) => return Err(TestCaseError::fail(other.to_string())),
        };
        let model = Model::all().into_iter().find(|model| model.family == name).unwrap();
        let facts = mapping.facts_of_config(&model.config()).unwrap_or_else(|_| Facts::new());
        let source = safetensors(&model.tensors());
        let options = MapOptions::default();
        if let Ok(mapped) = to_megatron_of(&source, &mapping, &facts, &options) {
            drop(to_hf_of(&mapped.source, &mapping, &mapped.facts, &options));
        }
        drop(to_hf_of(&stored("gpt_tp2pp2_swiglu"), &mapping, &facts, &options));
    }
}
