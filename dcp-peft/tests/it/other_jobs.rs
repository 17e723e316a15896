//! Adapters as sources of jobs that do not merge them.

use std::fs;
use std::path::Path;

use dcp_jobs::combine::{average, merge as combine};
use dcp_jobs::{ErrorKind, Format};
use dcp_peft::AdapterOptions;
use dcp_testing::{block_on, copy_folder, fixture};

use crate::support::{merge, open, tensors};

/// A copy of the adapter of `lora` in which the configuration has another text.
fn changed(folder: &Path, from: &str, to: &str) -> std::path::PathBuf {
    let adapter = folder.join(to.replace(['"', ':', ' '], ""));
    copy_folder(&fixture("peft/lora/ckpt"), &adapter);
    let config = adapter.join("adapter_config.json");
    let json = fs::read_to_string(&config).unwrap();
    assert!(json.contains(from));
    fs::write(config, json.replacen(from, to, 1)).unwrap();
    adapter
}

/// What a merge does not do is no damage.
#[test]
fn adapters_that_cannot_be_merged_are_whole() {
    block_on(async {
        let folder = tempfile::tempdir().unwrap();
        for (from, to, said) in [
            ("\"peft_type\": \"LORA\"", "\"peft_type\": \"IA3\"", "of type \"IA3\""),
            ("\"lora_bias\": false", "\"lora_bias\": true", "\"lora_bias\" changes"),
            ("\"r\": 4", "\"r\": -4", "the rank \"r\" is -4"),
        ] {
            let adapter = changed(folder.path(), from, to);
            let opened = open(&adapter).await.unwrap();
            assert_eq!((opened.format().name, opened.incomplete().await.unwrap()), ("peft", None));
            assert!(opened.verify().run().await.unwrap().problems.is_empty(), "{to}");
            let target = folder.path().join("no");
            let error = merge(&fixture("peft/lora/base"), &adapter, &target).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
            assert!(error.to_string().contains(said), "{error}");
            assert!(!target.exists());
        }
    });
}

#[test]
fn no_target_touches_the_adapter() {
    block_on(async {
        let folder = tempfile::tempdir().unwrap();
        let adapter = folder.path().join("models/adapter");
        fs::create_dir_all(&adapter).unwrap();
        copy_folder(&fixture("peft/lora/ckpt"), &adapter);
        let before = tensors(&adapter).await;
        let base = open(&fixture("peft/lora/base")).await.unwrap();
        for (target, format) in [
            ("models/adapter/adapter_model.safetensors", Format::Safetensors),
            ("models/adapter/adapter_config.json", Format::Safetensors),
            ("models/adapter", Format::HuggingFace),
            ("models/adapter/merged", Format::HuggingFace),
            ("models", Format::HuggingFace),
        ] {
            let options = AdapterOptions::new(open(&adapter).await.unwrap());
            let target = folder.path().join(target).to_str().unwrap().to_owned();
            let conversion = base.convert(&*target).to(format).overwrite(true).with(options);
            let error = conversion.run().await.map(|_| &target).unwrap_err();
            let text = error.to_string();
            let said = ["are the same", "in the source", "of the source"];
            assert!(said.iter().any(|said| text.contains(said)), "{target}: {text}");
            assert!(tensors(&adapter).await == before, "{target}");
        }
    });
}

#[test]
fn adapters_are_combined_with_adapters_alone() {
    block_on(async {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
        let base = open(&fixture("peft/lora/base")).await.unwrap();
        let adapter = async || open(&fixture("peft/lora/ckpt")).await.unwrap();
        let both = [base, adapter().await];
        for format in [Format::HuggingFace, Format::Dcp] {
            let error = combine(&both, at("no")).to(format).run().await.unwrap_err();
            assert!(error.to_string().contains("is an adapter"), "{error}");
        }
        let two = [adapter().await, adapter().await];
        let error = average(&two, at("no")).to(Format::HuggingFace).run().await.unwrap_err();
        assert!(error.to_string().contains("is an adapter"), "{error}");
        assert!(!Path::new(&at("no")).exists());
        average(&two, at("mean.safetensors")).run().await.unwrap();
        let mean = tensors(at("mean.safetensors").as_ref()).await;
        assert!(mean == tensors(&fixture("peft/lora/ckpt/adapter_model.safetensors")).await);
    });
}
