//! Adapters that PEFT 0.21 wrote, merged into their bases and compared with what its `merge_and_unload` made.

use std::fs;
use std::path::Path;

use dcp_core::DType;
use dcp_jobs::{Destination, ErrorKind, Format, JobOptions};
use dcp_peft::AdapterOptions;
use dcp_testing::{block_on, copy_folder, fixture};

use crate::support::{merge, open, opener, tensors};

/// Every fixture of `fixtures/peft`.
const FIXTURES: [&str; 13] = [
    "lora",
    "rslora",
    "dora",
    "patterns",
    "modules_to_save",
    "bias_embedding",
    "fan_in_fan_out",
    "wide_lora",
    "wide_dora",
    "wide_embedding",
    "wide_fan",
    "wide_mixed",
    "wide_tied",
];

#[test]
fn adapters_merge_as_peft_merges_them() {
    block_on(async {
        for name in FIXTURES {
            let folder = fixture(&format!("peft/{name}"));
            let temporary = tempfile::tempdir().unwrap();
            let at = |name: &str| temporary.path().join(name);
            let notes = merge(&folder.join("base"), &folder.join("ckpt"), &at("single")).await;
            let notes = notes.unwrap();
            assert!(notes.iter().any(|note| note.contains("changes")), "{notes:?}");
            let expected = tensors(&folder.join("expected.safetensors")).await;
            let found = tensors(&at("single")).await;
            assert_eq!(found.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
            for (fqn, (dtype, bytes)) in &expected {
                assert!(found[fqn] == (*dtype, bytes.clone()), "{name}: {fqn} differs");
            }

            // The base in half the bytes.
            let half = at("half-base").to_str().unwrap().to_owned();
            let base = open(&folder.join("base")).await.unwrap();
            let half = base.convert(half).to(Format::HuggingFace).dtype(DType::BFloat16);
            half.run().await.unwrap();
            merge(&at("half-base"), &folder.join("ckpt"), &at("half")).await.unwrap();
            let expected = tensors(&folder.join("expected_bf16.safetensors")).await;
            assert!(tensors(&at("half")).await == expected, "{name} in bfloat16");
        }
    });
}

/// What is written does not depend on how a base is divided and read: as PyTorch's format with several ranks,
/// with names below a root, and in segments of other sizes.
#[test]
fn bases_of_other_formats_merge_to_the_same() {
    block_on(async {
        for name in ["wide_dora", "wide_embedding", "wide_fan", "rslora"] {
            let folder = fixture(&format!("peft/{name}"));
            let temporary = tempfile::tempdir().unwrap();
            let at = |name: &str| temporary.path().join(name).to_str().unwrap().to_owned();
            merge(&folder.join("base"), &folder.join("ckpt"), at("hf").as_ref()).await.unwrap();
            let base = open(&folder.join("base")).await.unwrap();
            base.convert(Destination::new(at("dcp")).to(Format::Dcp).ranks(3)).run().await.unwrap();
            let dcp = opener().open(&at("dcp")).await.unwrap();
            let adapter = AdapterOptions::new(open(&folder.join("ckpt")).await.unwrap());
            let target = Destination::new(at("merged")).to(Format::Dcp).ranks(2);
            dcp.convert(target).with(adapter).run().await.unwrap();
            let (one, other) =
                (tensors(at("hf").as_ref()).await, tensors(at("merged").as_ref()).await);
            assert!(one == other, "{name}");
        }
    });
}

/// A part of a row of a DoRA depends on all of it.
#[test]
fn chosen_tensors_are_those_of_the_whole() {
    block_on(async {
        let folder = fixture("peft/wide_dora");
        let temporary = tempfile::tempdir().unwrap();
        let at = |name: &str| temporary.path().join(name);
        let adapter = AdapterOptions::new(open(&folder.join("ckpt")).await.unwrap());
        let base = open(&folder.join("base")).await.unwrap();
        let keys = dcp_jobs::Keys::all().include("*.q_proj.weight");
        let target = at("one.safetensors").to_str().unwrap().to_owned();
        base.convert(target).keys(keys).with(adapter).run().await.unwrap();
        let found = tensors(&at("one.safetensors")).await;
        let expected = tensors(&folder.join("expected.safetensors")).await;
        assert_eq!(found.len(), 1);
        assert!(found.iter().all(|(fqn, values)| *values == expected[fqn]));
    });
}

#[test]
fn adapters_open_and_are_no_models() {
    block_on(async {
        let folder = fixture("peft/lora");
        let adapter = open(&folder.join("ckpt")).await.unwrap();
        assert_eq!((adapter.format().name, adapter.incomplete().await.unwrap()), ("peft", None));
        let report = adapter.verify().deep(true).run().await.unwrap();
        assert!(report.problems.is_empty(), "{report:?}");
        let temporary = tempfile::tempdir().unwrap();
        let at = |name: &str| temporary.path().join(name).to_str().unwrap().to_owned();
        let refused = adapter.convert(at("hf")).to(Format::HuggingFace).run().await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::InvalidOption);
        assert!(!Path::new(&at("hf")).exists());
        adapter.convert(at("all.safetensors")).run().await.unwrap();
        let copy = tensors(at("all.safetensors").as_ref()).await;
        assert_eq!(copy, tensors(&folder.join("ckpt/adapter_model.safetensors")).await);
        // An adapter is no base, and a base no adapter.
        for (base, adapter) in [("ckpt", "ckpt"), ("base", "base")] {
            let error = merge(&folder.join(base), &folder.join(adapter), at("no").as_ref()).await;
            assert_eq!(error.unwrap_err().kind(), ErrorKind::InvalidOption, "{base} and {adapter}");
        }
        assert!(!Path::new(&at("no")).exists());
    });
}

#[test]
fn adapters_of_other_models_are_refused_by_name() {
    block_on(async {
        let refused = async |base: &str, adapter: &str, kind: ErrorKind, said: &str| {
            let temporary = tempfile::tempdir().unwrap();
            let target = temporary.path().join("merged");
            let (base, adapter) =
                (fixture(&format!("peft/{base}/base")), fixture(&format!("peft/{adapter}/ckpt")));
            let error = merge(&base, &adapter, &target).await.unwrap_err();
            assert_eq!(error.kind(), kind, "{error}");
            assert!(error.to_string().contains(said), "{error}");
            assert!(!target.exists());
        };
        refused("lora", "wide_lora", ErrorKind::Disagreement, "down_proj.weight").await;
        refused("lora", "fan_in_fan_out", ErrorKind::Unmapped, "c_attn.weight").await;
        // The head is tied to the embedding, so it is not in the base.
        refused("lora", "modules_to_save", ErrorKind::Unmapped, "lm_head.weight").await;
    });
}

/// A copy of an adapter with one file changed.
fn with_file(name: &str, change: impl FnOnce(&mut Vec<u8>)) -> tempfile::TempDir {
    let temporary = tempfile::tempdir().unwrap();
    copy_folder(&fixture("peft/lora/ckpt"), temporary.path());
    let file = temporary.path().join(name);
    let mut bytes = fs::read(&file).unwrap();
    change(&mut bytes);
    fs::write(&file, bytes).unwrap();
    temporary
}

#[test]
fn damaged_adapters_are_named_and_nothing_is_written() {
    const POINTER: &[u8] = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n";
    let config = |change: fn(&str) -> String| {
        with_file("adapter_config.json", |json| {
            *json = change(std::str::from_utf8(json).unwrap()).into_bytes();
        })
    };
    let cases = [
        ("a cut configuration", with_file("adapter_config.json", |json| json.truncate(40))),
        (
            "a pointer for a configuration",
            with_file("adapter_config.json", |json| *json = POINTER.to_vec()),
        ),
        (
            "cut tensors",
            with_file("adapter_model.safetensors", |bytes| bytes.truncate(bytes.len() - 4)),
        ),
        ("a cut header", with_file("adapter_model.safetensors", |bytes| bytes.truncate(20))),
        (
            "a pointer for tensors",
            with_file("adapter_model.safetensors", |bytes| *bytes = POINTER.to_vec()),
        ),
        ("another rank", config(|json| json.replace("\"r\": 4", "\"r\": 5"))),
        ("a rank of 0", config(|json| json.replace("\"r\": 4", "\"r\": 0"))),
        (
            "a DoRA without magnitudes",
            config(|json| json.replace("\"use_dora\": false", "\"use_dora\": true")),
        ),
        (
            "a later setting",
            config(|json| json.replace("\"use_dora\"", "\"later\": 3, \"use_dora\"")),
        ),
        (
            "one matrix",
            with_file("adapter_model.safetensors", |bytes| {
                let at = bytes.windows(8).position(|window| window == b"lora_B.w").unwrap();
                bytes[at..at + 6].copy_from_slice(b"lora_C");
            }),
        ),
    ];
    block_on(async {
        for (what, folder) in cases {
            let temporary = tempfile::tempdir().unwrap();
            let target = temporary.path().join("merged");
            let error = merge(&fixture("peft/lora/base"), folder.path(), &target).await;
            let error = error.map(|_| what).unwrap_err();
            let text = error.to_string();
            assert!(!text.is_empty() && !target.exists(), "{what}: {text}");
            println!("{what}: {text}");
        }
    });
}

#[test]
fn one_segment_or_many_give_the_same() {
    // Two jobs at once share the matrices that are kept.
    block_on(async {
        let folder = fixture("peft/wide_lora");
        let temporary = tempfile::tempdir().unwrap();
        let at = |name: &str| temporary.path().join(name).to_str().unwrap().to_owned();
        for parallelism in [1, 8] {
            let adapter = AdapterOptions::new(open(&folder.join("ckpt")).await.unwrap());
            let base = open(&folder.join("base")).await.unwrap();
            let mut job = JobOptions::default();
            job.parallelism = parallelism;
            let target = base.convert(at(&format!("{parallelism}.safetensors"))).with(adapter);
            target.job(job).run().await.unwrap();
        }
        assert!(fs::read(at("1.safetensors")).unwrap() == fs::read(at("8.safetensors")).unwrap());
    });
}
