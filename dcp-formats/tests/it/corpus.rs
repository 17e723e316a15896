//! Replays the seeds of the fuzz targets, whole, cut short, and damaged: nothing may panic, hang,
//! or claim more memory than the input accounts for.

#[path = "support/targets.rs"]
mod targets;
#[path = "support/torch_save_target.rs"]
mod torch_save_target;

use std::path::Path;

use dcp_core::plan::{LoadPlan, SavePlan, WritePlan};
use proptest::prelude::*;

fn replay(target: &str, run: fn(&[u8])) {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus").join(target);
    let mut seeds = 0;
    for file in std::fs::read_dir(dir).unwrap() {
        let bytes = std::fs::read(file.unwrap().path()).unwrap();
        run(&bytes);
        let step = (bytes.len() / 200).max(1);
        for len in (0..bytes.len()).step_by(step) {
            run(&bytes[..len]);
        }
        let mut damaged = bytes.clone();
        for at in (0..bytes.len()).step_by(step) {
            for bit in [at % 8, (at + 5) % 8] {
                damaged[at] ^= 1 << bit;
                run(&damaged);
                damaged[at] = bytes[at];
            }
        }
        seeds += 1;
    }
    assert!(seeds >= 8, "{target} has {seeds} seeds");
}

#[test]
fn pickles() {
    replay("pickle", targets::pickle);
}

#[test]
fn archives() {
    replay("torch_zip", targets::torch_zip);
}

#[test]
fn indexes() {
    replay("metadata", targets::metadata);
}

#[test]
fn indexes_of_every_fixture() {
    metadata_files().iter().for_each(|bytes| targets::metadata(bytes));
}

/// The `.metadata` of every fixture that PyTorch wrote.
fn metadata_files() -> Vec<Vec<u8>> {
    let names = crate::support::names();
    let files = names.iter().flat_map(|name| crate::support::metadata_files(name));
    files.map(|(file, _)| std::fs::read(file).unwrap()).collect()
}

/// How one byte of an index is damaged.
#[derive(Clone, Copy, Debug)]
enum Damage {
    Replace(u8),
    Insert(u8),
    Remove,
    /// Repeats this many bytes.
    Repeat(usize),
}

fn damage() -> impl Strategy<Value = Damage> {
    // Opcodes of records, so that most bytes mean something.
    let opcode = prop::sample::select(b"(KMJNXhjqr\x81\x85\x86\x87\x8a\x8c\x94Rtub})]es0".to_vec());
    prop_oneof![
        any::<u8>().prop_map(Damage::Replace),
        opcode.clone().prop_map(Damage::Replace),
        opcode.prop_map(Damage::Insert),
        Just(Damage::Remove),
        (1_usize..200).prop_map(Damage::Repeat),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// Records change nothing of what an index says, however damaged it is.
    #[test]
    fn damaged_indexes(
        file in any::<prop::sample::Index>(),
        damages in prop::collection::vec((any::<prop::sample::Index>(), damage()), 0..4),
    ) {
        let mut files = metadata_files();
        let mut bytes = files.swap_remove(file.index(files.len()));
        for (at, damage) in damages {
            let at = at.index(bytes.len());
            match damage {
                Damage::Replace(byte) => bytes[at] = byte,
                Damage::Insert(byte) => bytes.insert(at, byte),
                Damage::Remove => _ = bytes.remove(at),
                Damage::Repeat(len) => {
                    let end = bytes.len().min(at + len);
                    let again = bytes[at..end].to_vec();
                    bytes.splice(at..at, again);
                }
            }
        }
        targets::metadata(&bytes);
    }
}

#[test]
fn folders() {
    replay("folder", targets::folder);
}

#[test]
fn tensors() {
    replay("tensor_blob", targets::tensor_blob);
}

#[test]
fn objects() {
    replay("object_blob", targets::object_blob);
}

#[test]
fn safetensors_headers() {
    replay("safetensors", targets::safetensors);
}

#[test]
fn zarr_headers() {
    replay("zarr", targets::zarr);
}

#[test]
fn plans_on_the_wire() {
    replay("plan_wire", targets::plan_wire);
}

/// Seeds of another version would reach nothing but the comparison of versions.
#[test]
fn seeds_of_plans_are_of_this_version() {
    let seed = |name: &str| {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/plan_wire");
        std::fs::read(dir.join(name)).unwrap()
    };
    for name in ["save_empty", "save_object", "save_plain", "save_tensor", "save_numbers"] {
        assert!(SavePlan::from_wire(&seed(name)).is_ok(), "{name}");
    }
    assert_eq!(
        SavePlan::from_wire(&seed("save_tensor")),
        SavePlan::from_wire(&seed("save_numbers"))
    );
    for name in ["write_empty", "write_one", "write_layers", "write_zstd"] {
        assert!(WritePlan::from_wire(&seed(name)).is_ok(), "{name}");
    }
    assert_eq!(LoadPlan::from_wire(&seed("load_sample")).map(|plan| plan.items.len()), Ok(2));
    let answers = |name| targets::answers_of(&seed(name)).map(|plans| plans.len());
    assert_eq!(answers("answers"), Ok(3));
    assert!(answers("answers_of_another_outline").unwrap_err().to_string().contains("outline"));
    assert!(answers("answers_too_short").is_err());
}

#[test]
fn sidecars() {
    replay("sidecar", targets::sidecar);
}

#[test]
fn indexes_of_models() {
    replay("hf_index", targets::hf_index);
}

#[test]
fn pickles_written_again() {
    replay("pickle", targets::pickle_rewrite);
    replay("pickle_rewrite", targets::pickle_rewrite);
}

#[test]
fn torch_save_files() {
    replay("torch_save", torch_save_target::torch_save);
}
