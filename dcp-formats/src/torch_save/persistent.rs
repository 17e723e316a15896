//! Copies references to storages from one pickle into another.

use dcp_core::FormatError;

use crate::pickle::{Node, NodeId, PersistentSink, Pickle, Writer};
use crate::torch_tensor::{StorageRef, stored};

/// Returns the key in the new file for a storage with elements of this many bytes.
pub(super) type Numbers<'n> =
    &'n mut (dyn FnMut(&StorageRef, u64) -> Result<String, FormatError> + 'n);

/// Writes references to storages with new keys.
pub(super) struct PersistentStorages<'n> {
    pub(super) numbers: Numbers<'n>,
    /// The device for the storages; `None` keeps their own.
    pub(super) device: Option<&'n str>,
}

impl PersistentSink for PersistentStorages<'_> {
    fn persistent(
        &mut self,
        writer: &mut Writer,
        pickle: &Pickle<'_>,
        id: NodeId,
    ) -> Result<(), FormatError> {
        let bad = |problem: &str| FormatError::new("object", problem);
        let Node::Persistent(pid) = *pickle.node(id) else { return Ok(()) };
        if let Some((module, class)) = module_class(pickle, pid) {
            writer.global(module, class);
            return Ok(());
        }
        let (storage, element) = stored(pickle, id).ok_or_else(|| {
            bad("it refers to something outside of the file that is not a storage")
        })?;
        let [_, class, _, _, _, view @ ..] = pickle.tuple(pid) else { return Ok(()) };
        if view.iter().any(|view| !matches!(pickle.node(*view), Node::None)) {
            return Err(bad("it has a storage that is a part of another one"));
        }
        let Some(class) = pickle.global_name(*class) else { return Ok(()) };
        let key = (self.numbers)(&storage, element)?;
        let device = self.device.unwrap_or(&storage.location);
        writer.storage(class, &key, device, storage.byte_len / element);
        Ok(())
    }
}

/// The class whose source code older files also store.
fn module_class<'p>(pickle: &'p Pickle<'_>, pid: NodeId) -> Option<(&'p str, &'p str)> {
    match pickle.tuple(pid) {
        [tag, class, ..] if pickle.str(*tag) == Some("module") => pickle.global_name(*class),
        _ => None,
    }
}
