//! Files that are no mappings, and what is said about them.

use dcp_mapping::{Mapping, MappingError};

/// The line and the problem of a file with `rules` behind a good beginning of three lines.
fn refused(rules: &str) -> (usize, String) {
    let text = format!("[family]\nname = \"mine\"\n\n{rules}");
    match Mapping::parse(&text, "mine.toml").unwrap_err() {
        MappingError::Declaration { file, line, problem } => {
            assert_eq!(file, "mine.toml");
            (line, problem)
        }
        other => panic!("{other}"),
    }
}

#[test]
fn all_that_come_along_are_read() {
    let all = Mapping::builtins().unwrap();
    let names: Vec<_> = all.iter().map(Mapping::name).collect();
    assert_eq!(names, Mapping::families());
    for mapping in &all {
        assert!(!mapping.title().is_empty() && !mapping.model_types().is_empty());
    }
    assert_eq!(Mapping::builtin("qwen3_moe").unwrap().title(), "Qwen3-MoE");
    let error = Mapping::builtin("bert").unwrap_err();
    assert!(error.to_string().contains("\"bert\"; there are llama, "), "{error}");
    assert!(error.to_string().ends_with(", torchtitan_llama"), "{error}");
}

#[test]
fn every_mistake_has_its_line() {
    for (rules, line, expected) in [
        ("x = ", 4, "string values must be quoted"),
        ("[[rule]]\nhf = \"a\"\nmegatron = \"b\"\nop = \"frobnicate\"", 7, "\"frobnicate\""),
        ("[[rule]]\nhf = \"a\"\nmegatron = \"b\"\noperation = \"copy\"", 7, "operation"),
        ("[[rule]]\nhf = \"a\"", 4, "megatron"),
        ("[[rule]]\nhf = 3\nmegatron = \"b\"", 5, "a name or a list of names"),
        ("[[rule]]\nhf = \"a.{block}\"\nmegatron = \"b\"", 5, "{layer}, {expert} or {mtp}"),
        ("[[rule]]\nhf = \"a\"\nmegatron = \"{prefix}b\"", 6, "needs no {prefix}"),
        ("[[rule]]\nhf = \"a.{layer}.b\"\nmegatron = \"b\"", 4, "same numbers open"),
        ("[[rule]]\nhf = []\nmegatron = \"b\"", 4, "takes 1 of Hugging Face's names, not 0"),
        ("[[rule]]\nhf = [\"a\", \"c\"]\nmegatron = \"b\"", 4, "not 2"),
        ("[[rule]]\nhf = [\"a\", \"c\"]\nmegatron = \"b\"\nop = \"qkv\"", 7, "1 or 3"),
        ("[[rule]]\nhf = \"a\"\nmegatron = \"b\"\naxis = 1", 4, "takes no axis"),
        ("[[rule]]\nhf = \"a\"\nmegatron = \"b\"\nshape = [\"x\"]", 4, "[config.fields] lacks"),
        (
            "[[rule]]\nhf = \"a\"\nmegatron = \"b\"\nop = \"vocab\"\nshape = [\"x\"]",
            8,
            "the same on both sides",
        ),
        (
            "[[rule]]\nhf = [\"a\", \"c\"]\nmegatron = \"b\"\nop = \"concat\"\nsizes = [\"x\"]",
            8,
            "2 parts have 2 sizes",
        ),
        (
            "[[rule]]\nhf = [\"a\", \"c\"]\nmegatron = \"b\"\nop = \"concat\"\nsizes = [\"x+1\", \"y\"]",
            8,
            "\"x+1\" is not a size",
        ),
        (
            "[[rule]]\nhf = [\"a\", \"c\"]\nmegatron = \"b\"\nop = \"concat\"\nsizes = [\"rest\", \"rest\"]",
            8,
            "at most one",
        ),
        ("[[rule]]\nhf = \"a\"\nmegatron = \"b\"\nlayers = \"odd\"", 7, "\"odd\""),
        ("[[rule]]\nhf = \"a\"\nmegatron = \"b\"\nop = \"rotary\"", 7, "has the heads \"query\""),
        ("[[rule]]\nhf = \"a\"\nmegatron = \"b\"\nheads = \"key\"", 7, "only \"rotary\" has heads"),
        (
            "[[rule]]\nhf = [\"a\", \"c\"]\nmegatron = \"b\"\nop = \"rotary\"\nheads = \"key\"",
            7,
            "one of Hugging Face's names",
        ),
        ("[[rule]]\nhf = \"a\"\nmegatron = \"b\"\nlayers = \"moe\"", 4, "no {layer}"),
        ("[[rule]]\nhf = \"a\"\nmegatron = \"b\"\nhf_dtype = \"float17\"", 7, "\"float17\""),
        (
            "[[rule]]\nhf = \"a\"\nmegatron = \"b\"\n[[rule]]\nhf = \"a\"\nmegatron = \"c\"",
            7,
            "\"a\" is written by the rule at line 4 too",
        ),
        (
            "[[rule]]\nhf = \"a\"\nmegatron = \"b\"\n[[rule]]\nname = \"x\"\nhf = \"c\"\nmegatron = \"b\"",
            7,
            "\"{prefix}b\" is written by the rule at line 4 too",
        ),
        (
            "[[rule]]\nhf = \"a\"\nmegatron = \"b\"\n[[rule]]\nhf = \"c\"\nmegatron = \"b\"",
            7,
            "called \"b\" too",
        ),
        (
            "[[rule]]\nhf = \"a.{layer}\"\nmegatron = \"b.{layer}\"\nlayers = \"dense\"\n\
             [[rule]]\nhf = \"a.{layer}\"\nmegatron = \"c.{layer}\"",
            8,
            "\"a.{layer}\" is written by the rule at line 4 too",
        ),
        ("[[rule]]\nhf = \"a\"\nmegatron = \"b\"\ninstead = \"c\"", 4, "no rule \"c\""),
        ("[[rule]]\nhf = \"a\"\nmegatron = \"b\"\ntied_to = \"b\"", 4, "no rule \"b\""),
        ("[[rule]]\nhf = \"a.{layer}.{mtp}\"\nmegatron = \"b.{layer}.{mtp}\"", 4, "not both"),
        (
            "[[rule]]\nhf = \"a\"\nmegatron = \"b\"\n\n[config]\nrope = \"spiral\"",
            8,
            "no rope \"spiral\"; there are plain",
        ),
        (
            "[[rule]]\nhf = \"a\"\nmegatron = \"b\"\n[[repeat]]\nhf = [\"x\", \"y\"]\nmegatron = [\"x\", \"y\"]",
            7,
            "no rule has names",
        ),
        ("", 1, "no [[rule]]"),
    ] {
        let (found, problem) = refused(rules);
        assert!(problem.contains(expected), "{rules}\n{problem}");
        assert_eq!(found, line, "{rules}\n{problem}");
    }
    let long = format!("#{}", " ".repeat(1 << 20));
    assert!(Mapping::parse(&long, "x").unwrap_err().to_string().contains("bytes"));
    let deep = format!("x = {}", "[".repeat(100_000));
    assert!(Mapping::parse(&deep, "x").is_err());
}

/// Each repetition repeats those before it, so some lines could make any number of rules.
#[test]
fn no_file_makes_more_rules_or_longer_names_than_it_may() {
    let repeat = |n: usize, name: &str| {
        format!("[[repeat]]\nhf = [\"\", \"{name}{n}.\"]\nmegatron = [\"\", \"{name}{n}.\"]\n")
    };
    let rule = "[[rule]]\nhf = \"a\"\nmegatron = \"b\"\n";
    let doubled: String = (0..60).map(|n| repeat(n, "r")).collect();
    let (line, problem) = refused(&format!("{rule}{doubled}"));
    assert!(problem.contains("more than 4096 rules"), "{problem}");
    assert_eq!(line, 4 + 3 + 12 * 3, "the repetition that makes too many");

    let long = "x".repeat(10_000);
    let longer: String = (0..11).map(|n| repeat(n, &long)).collect();
    let (_, problem) = refused(&format!("{rule}{longer}"));
    assert!(problem.contains("too long together"), "{problem}");

    let many: String =
        (0..5000).map(|n| format!("[[rule]]\nhf=\"{n}\"\nmegatron=\"{n}\"\n")).collect();
    let (line, problem) = refused(&many);
    assert!(problem.contains("more than 4096 rules"), "{problem}");
    assert_eq!(line, 4 + 4096 * 3);
}

#[test]
fn what_is_nested_without_end_is_refused() {
    let deep = 50_000;
    for text in [
        format!("x = {}", "[".repeat(deep)),
        format!("x = {}", "{a=".repeat(deep)),
        format!("[config.constants]\n{}a = 1", "a.".repeat(deep)),
        format!("[config.constants{}]\n", ".a".repeat(deep)),
        format!("[[rule]]\nhf = {}\nmegatron = \"b\"", "[".repeat(deep)),
    ] {
        let text =
            format!("[family]\nname = \"mine\"\n\n{text}\n[[rule]]\nhf = \"a\"\nmegatron = \"b\"");
        Mapping::parse(&text, "mine.toml").unwrap_err();
    }
}
