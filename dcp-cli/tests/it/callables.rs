//! Checkpoints that run something where Python loads them.

use std::fs;
use std::path::Path;

use dcp::core::Value;
use dcp::core::value::{Dict, Global, Object};
use dcp::formats::torch_save::encode_value;
use tempfile::TempDir;

use crate::megatron::copy;
use crate::support::{dcp, path};

const MODEL: &str = "gpt_tp2pp2_swiglu/ckpt";

/// A checkpoint of Megatron-Core whose common state runs a command.
fn hostile_common() -> TempDir {
    let args = vec![Value::Str("touch /tmp/pwned".into())];
    let hook = Value::Object(Box::new(Object::new(Global::new("posix", "system"), args)));
    let common: Value = Dict::from([
        ("iteration".to_owned(), Value::Int(1)),
        ("hooks".to_owned(), Value::List(vec![hook])),
    ])
    .into();
    let folder = copy(MODEL);
    fs::write(folder.path().join("common.pt"), encode_value(&common, "common").unwrap()).unwrap();
    folder
}

/// Expects that nothing is converted with the objects, and something without them.
#[track_caller]
fn is_contained(uri: &str, key: &str, name: &str) {
    let out = tempfile::tempdir().unwrap();
    let target = path(&out, "out");
    for more in [["--to", "torch-dist"], ["--to", "dcp"], ["--to", "torch-save"]] {
        dcp(["-q", "convert", uri, &target].iter().chain(&more)).fails(1, &[name, key]);
    }
    dcp(["-q", "reshard", uri, &target, "--tp", "1"]).fails(1, &[name, "--allow-callable"]);
    assert_eq!(fs::read_dir(out.path()).unwrap().count(), 0, "nothing was written");
    let verified = dcp(["verify", uri]);
    assert_eq!(verified.code, 1, "{}{}", verified.stdout, verified.stderr);
    assert!(verified.stdout.contains(name), "{}", verified.stdout);
    let inspected = dcp(["inspect", uri]);
    assert_eq!(inspected.code, 0);
    assert!(inspected.stderr.contains(name), "{}", inspected.stderr);
    dcp(["convert", uri, &path(&out, "x.safetensors")]).ok();
    // The form that every version reads has plain arguments.
    let admitted = ["--to", "torch-dist", "--form", "newest", "--allow-callable", name];
    let converted = dcp(["convert", uri, &target].iter().chain(&admitted));
    assert_eq!(converted.code, 0, "{}", converted.stderr);
    assert!(converted.stderr.contains(&format!("Python will run {name}")), "{}", converted.stderr);
    assert_eq!(dcp(["verify", &target, "--json"]).code, 1);
}

#[test]
fn a_common_state_that_runs_commands_is_named_and_not_written() {
    let folder = hostile_common();
    is_contained(&path(&folder, ""), "common_state", "posix.system");
}

/// Puts another name in the place of one in a file of `torch.save`, and leaves its checksum out,
/// as PyTorch does with an option.
fn renamed(file: &Path, from: &str, to: &str) {
    assert_eq!(from.len(), to.len());
    let mut bytes = fs::read(file).unwrap();
    let find = |bytes: &[u8], what: &[u8]| bytes.windows(what.len()).position(|at| at == what);
    let at = find(&bytes, from.as_bytes()).unwrap();
    bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
    let mut entry = 0;
    loop {
        entry += find(&bytes[entry..], b"PK\x01\x02").unwrap();
        let name = &bytes[entry + 46..];
        let len = usize::from(bytes[entry + 28]);
        if name[..len].ends_with(b"/data.pkl") {
            bytes[entry + 16..entry + 20].fill(0);
            return fs::write(file, bytes).unwrap();
        }
        entry += 4;
    }
}

#[test]
fn a_file_of_a_rank_that_runs_commands_is_named_and_not_written() {
    let folder = copy("run_legacy_torch_tp2/iter_0000010");
    let file = folder.path().join("mp_rank_00/model_optim_rng.pt");
    let (from, to) = ("megatron.core.transformer.enums", "AttnBackend");
    let name = "r".repeat(from.len() + to.len() - "subprocess".len());
    renamed(&file, &format!("c{from}\n{to}\n"), &format!("csubprocess\n{name}\n"));
    is_contained(&path(&folder, ""), "args", &format!("subprocess.{name}"));
}
