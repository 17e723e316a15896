//! Rewrites a file in another form: one graph, and its storages byte for byte.

use std::collections::HashMap;
use std::sync::Arc;

use dcp_core::{CheckpointError, FormatError, Key};
use indexmap::IndexMap;

use super::compose::{Composed, NewStorage, StorageContent};
use super::contents::LIMITS;
use super::index::{Index, Leaf};
use super::persistent::PersistentStorages;
use super::write::{Made, TorchSaveOptions, TorchSavePlan};
use crate::pickle::{Pickle, Writer};
use crate::torch_tensor::{ByteOrder, StorageRef};
use crate::torch_zip::{Method, Record};

/// A file with the exact objects of another one.
#[derive(Debug)]
pub struct TorchSaveRewrite {
    /// The layout. Its items are `records`; writing fails when the CRC-32 of one differs from the
    /// old file's.
    pub plan: TorchSavePlan,
    /// The storages of the old file that objects use, whose bytes are copied.
    pub records: Vec<Record>,
}

impl TorchSaveRewrite {
    /// Lays out the file `key`, with the contents of `index` and `source`.
    ///
    /// Returns `None` for files that cannot be copied: big-endian ones, deflated ones, and those
    /// that refer to anything but whole storages.
    pub(super) fn new(
        key: &Key,
        source: &Key,
        index: &Index,
        options: &TorchSaveOptions,
    ) -> Result<Option<Self>, CheckpointError> {
        let (contents, device) = (&index.contents, options.device.as_deref());
        let deflated = contents.storages.values().any(|record| record.method != Method::Stored);
        if contents.byte_order == ByteOrder::Big || deflated {
            return Ok(None);
        }
        let pickle = Pickle::parse(&contents.pickle, &LIMITS)?;
        let Ok(composed) = compose(&pickle, Writer::new(), 0, device) else { return Ok(None) };
        let records = composed.1.iter().map(|storage| contents.storage(storage));
        let records = records.collect::<Result<Vec<_>, _>>();
        let records = records.map_err(|error| error.in_file(source.as_str(), 0))?;
        let mut names: HashMap<&str, &Arc<str>> = HashMap::new();
        for ((fqn, _), leaf) in index.metadata.iter().zip(&index.leaves) {
            if let Leaf::Tensor(layout, _) = leaf {
                names.entry(&layout.storage().key).or_insert(fqn);
            }
        }
        let made = composed.1.iter().zip(&records).map(|(storage, record)| Made {
            name: match names.get(&*storage.key) {
                Some(fqn) => fqn.to_string(),
                None => format!("storage {:?}", storage.key),
            },
            expected: Some((record.clone(), source.clone())),
        });
        let made = made.collect();
        let plan = TorchSavePlan::lay_out(key, options, made, |writer, key_width| {
            compose(&pickle, writer, key_width, device).map(|(composed, _)| composed)
        })?;
        Ok(Some(Self { plan, records }))
    }
}

/// Composes the pickle with new storage keys. Also returns the old keys in the order of the new
/// ones.
fn compose(
    pickle: &Pickle<'_>,
    mut writer: Writer,
    key_width: usize,
    device: Option<&str>,
) -> Result<(Composed, Vec<StorageRef>), FormatError> {
    let mut used: IndexMap<Box<str>, (StorageRef, u64)> = IndexMap::new();
    let mut numbers = |storage: &StorageRef, element: u64| {
        let entry = used.entry(storage.key.clone());
        let number = entry.index();
        entry.or_insert_with(|| (storage.clone(), element));
        Ok(format!("{number:0key_width$}"))
    };
    let mut renumbered = PersistentStorages { numbers: &mut numbers, device };
    writer.graph(pickle, pickle.root(), &mut renumbered)?;
    let storages = used.values().enumerate().map(|(number, (storage, element))| NewStorage {
        content: StorageContent::Item(number),
        byte_len: storage.byte_len,
        element: *element,
    });
    let composed = Composed { pickle: writer.finish()?, storages: storages.collect() };
    Ok((composed, used.into_values().map(|(storage, _)| storage).collect()))
}
