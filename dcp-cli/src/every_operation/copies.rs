//! `dcp copy`, stopped at every one of its operations in every way.

use std::path::Path;
use std::sync::Arc;

use super::{Files, WAYS, dcp, files, is_lock, is_temporary, put, scratch};

/// Files that are copied after the data, one by one.
const INDICES: [&str; 3] = [".metadata", "common.pt", "metadata.json"];

fn is_index(name: &Path) -> bool {
    name.file_name().is_some_and(|name| INDICES.iter().any(|index| name == *index))
}

/// What is at the target, without temporary files and locks of a writer that was killed.
pub(super) fn at(target: &Path) -> Files {
    files(target).into_iter().filter(|(name, _)| !is_temporary(name) && !is_lock(name)).collect()
}

/// A copy that is stopped is no checkpoint, and the same command continues it.
#[track_caller]
fn continues(source: &Path, interrupted: Option<&Files>) {
    let wanted = at(source);
    assert!(wanted.len() > 1);
    for way in &WAYS {
        for operation in 1.. {
            let folder = scratch();
            let target = folder.path().join("copy");
            if let Some(files) = interrupted {
                put(files, &target);
            }
            let args = ["copy", &source.display().to_string(), &target.display().to_string()];
            let how = way.how;
            let ran = dcp(&args, Some(Arc::new(move |storage| how(storage, operation))));
            let when = format!("{} at operation {operation}", way.name);
            let found = at(&target);
            if found.keys().any(|name| is_index(name)) {
                let mut data = wanted.iter().filter(|(name, _)| !is_index(name));
                assert!(data.all(|(name, bytes)| found.get(name) == Some(bytes)), "{when}");
            }
            let (is_over, is_ok) = (operation > ran.effects.len() as u64, ran.outcome.is_ok());
            assert!(!is_ok || found == wanted, "{when}: {}", ran.said);
            dcp(&args, None).ok(&when);
            assert!(at(&target) == wanted, "{when}");
            if is_over {
                break;
            }
        }
    }
}

#[test]
fn a_copy_of_a_checkpoint_continues() {
    continues(&dcp_testing::fixture("pytorch/fsdp2_adam_2r"), None);
}

#[test]
fn a_copy_of_a_megatron_checkpoint_continues() {
    continues(&dcp_testing::fixture("megatron/tp2_basic/ckpt"), None);
}

#[test]
fn a_copy_over_damaged_remains_of_another_continues() {
    let source = dcp_testing::fixture("pytorch/fsdp2_adam_2r");
    let mut remains = at(&source);
    remains.retain(|name, _| !is_index(name));
    let mut damage = [1, 2].into_iter().cycle();
    for bytes in remains.values_mut() {
        match damage.next() {
            Some(1) => bytes.truncate(bytes.len() / 2),
            _ => bytes.iter_mut().for_each(|byte| *byte ^= 1),
        }
    }
    continues(&source, Some(&remains));
}
