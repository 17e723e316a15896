//! The URL schemes.

use std::path::Path;
use std::sync::{Arc, OnceLock};

use dcp_core::error::StorageOp;
use dcp_core::registry::{Access, StorageRegistry};
use dcp_core::{Key, StorageError, StorageErrorKind};
use opendal::Operator;
use opendal::services::{Fs, Memory};

use crate::OpendalStorage;
use crate::error::storage_error;

/// The folder of temporary files, on the file system of the objects, which a rename needs.
const TEMPORARY: &str = ".opendal";

/// Registers `opendal-fs://PATH`, and `opendal-memory://NAME`, whose objects last as long as the
/// registry.
///
/// ```
/// use dcp_core::registry::{Access, StorageRegistry};
///
/// # fn example(mut storages: StorageRegistry) {
/// opendal_storage::register(&mut storages);
/// let opened = storages.open("opendal-memory://runs/step_1000", Access::Write);
/// # drop(opened);
/// # }
/// ```
pub fn register(storages: &mut StorageRegistry) {
    storages.register("opendal-fs", |request| {
        let path = request.url.trim_start_matches("opendal-fs://");
        Ok(Arc::new(fs(path, request.access)?))
    });
    let objects: Arc<OnceLock<Operator>> = Arc::default();
    storages.register("opendal-memory", move |request| {
        let folder = Key::new(request.url.trim_start_matches("opendal-memory://"))?;
        Ok(Arc::new(memory(&objects)?.folder(&folder)))
    });
}

/// The memory of this process.
fn memory(objects: &OnceLock<Operator>) -> Result<OpendalStorage, StorageError> {
    let operator = match objects.get() {
        Some(operator) => operator.clone(),
        None => {
            let made = Operator::new(Memory::default());
            let made = made.map_err(|error| storage_error(StorageOp::Open, None, error))?;
            objects.get_or_init(|| made.finish()).clone()
        }
    };
    Ok(OpendalStorage::new(operator).atomic_create(true))
}

/// A folder of a local disk.
fn fs(path: &str, access: Access) -> Result<OpendalStorage, StorageError> {
    let error = |error| storage_error(StorageOp::Open, None, error);
    if access == Access::Read && !Path::new(path).is_dir() {
        // The service makes what is not there.
        return Err(StorageError::new(StorageErrorKind::NotFound, StorageOp::Open, None));
    }
    let mut service = Fs::default().root(path);
    if access == Access::Write {
        let temporary = Path::new(path).join(TEMPORARY);
        service = service.atomic_write_dir(&temporary.to_string_lossy());
    }
    let operator = Operator::new(service).map_err(error)?.finish();
    Ok(OpendalStorage::new(operator).hide(Key::new(TEMPORARY)?))
}
