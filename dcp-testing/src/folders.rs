//! Folders of the file system.

use std::path::{Path, PathBuf};

/// The folder of all fixtures.
#[must_use]
pub fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures")
}

/// A file or folder below [`fixtures`], such as `pytorch/t21_plain`.
#[must_use]
pub fn fixture(name: &str) -> PathBuf {
    fixtures().join(name)
}

/// Copies all files below `from` to `to`, which is created.
#[track_caller]
pub fn copy_folder(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let to = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy_folder(&entry.path(), &to);
        } else {
            std::fs::copy(entry.path(), to).unwrap();
        }
    }
}
