//! What killed uploads leave, and errors that name what is missing.

use std::time::Duration;

use dcp_core::storage::{
    Leftover, LeftoverAction, LeftoverKind, PutMode, StorageExt, UploadOptions,
};
use dcp_core::{Key, Payload, StorageErrorKind as Kind};
use libtest_mimic::Trial;

use crate::{Emulator, trial};

pub(crate) fn trials(emulator: &Emulator) -> Vec<Trial> {
    let name = |case: &str| format!("{}::{case}", emulator.name);
    let with = || emulator.clone();
    let bucket = with();
    let mut all = vec![trial(name("a_missing_bucket_is_no_bucket"), || missing_bucket(bucket))];
    if emulator.name != "azure" {
        let emulator = with();
        let name = name("uploads_of_killed_processes_are_removed");
        all.push(trial(name, || killed_upload(emulator)));
    }
    all
}

async fn missing_bucket(emulator: Emulator) {
    let (scheme, _) = emulator.url.split_once("://").unwrap();
    let url = format!("{scheme}://no-such-bucket-of-dcp/a");
    let storage = emulator.open_at(&url, emulator.options.clone()).await;
    let key = Key::new("a").unwrap();
    let of = |error: dcp_core::StorageError| (error.kind(), error.to_string());
    let found = [
        of(storage.stat(&key).await.unwrap_err()),
        of(storage.read_range(&key, 0..1).await.unwrap_err()),
        of(storage.put(&key, "x".into(), PutMode::Overwrite).await.unwrap_err()),
    ];
    assert!(found.iter().all(|(kind, _)| *kind == Kind::NoBucket), "{found:?}");
}

async fn killed_upload(emulator: Emulator) {
    let storage = emulator.open().await;
    let key = Key::new("killed/object").unwrap();
    let part_bytes = storage.capabilities().write_limits.part_bytes_min;
    let start = || storage.start_upload(&key, UploadOptions::new(PutMode::Overwrite, part_bytes));
    for _ in 0..3 {
        let mut upload = start().await.unwrap();
        upload.put_part(Payload::from("a part")).await.unwrap();
        // As if the process were killed.
        std::mem::forget(upload);
    }
    let (folder, other) = (Key::new("killed").unwrap(), Key::new("other").unwrap());
    let find = |folder, action| storage.leftovers(Some(folder), Duration::ZERO, action);
    let (list, remove) = (LeftoverAction::List, LeftoverAction::Remove);
    // The age is not tested here: every upload of moto began in 2010.
    assert_eq!(find(&other, remove).await.unwrap(), []);
    let listed = find(&folder, list).await.unwrap();
    let open = |one: &Leftover| one.kind == LeftoverKind::OpenUpload && one.path == key.as_str();
    assert!(listed.len() == 3 && listed.iter().all(open), "{listed:?}");
    assert_eq!(find(&folder, remove).await.unwrap(), listed);
    assert_eq!(find(&folder, remove).await.unwrap(), []);
}
