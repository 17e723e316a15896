//! Files of `torch.save`: everything is read, and written again.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use async_trait::async_trait;
use dcp::core::StorageReader;
use dcp::core::checkpoint::DataSource;
use dcp::core::metadata::{Encoding, Entry, Layout, Placement};
use dcp::core::registry::Access;
use dcp::core::storage::OwnThreads;
use dcp::core::{CheckpointError, Key, Payload, PlanError};
use dcp::engine::{Loader, Settings};
use dcp::formats::torch_save::{
    TorchSaveContent, TorchSaveForm, TorchSaveItem, TorchSaveOptions, TorchSaveReader, write,
};
use dcp::formats::torch_zip::RecordSet;
use dcp::{Collective, DType, StateDict, Tensor, Value};

use crate::Result;

/// Reads `folder/name` and writes it as `folder/new`.
pub(crate) async fn resave(
    folder: &str,
    name: &str,
    new: &str,
    form: &str,
    group: &Arc<dyn Collective>,
) -> Result {
    let storage = dcp::default_storages().open(folder, Access::Write).await?;
    let reader = TorchSaveReader::new(Arc::clone(&storage), Key::new(name)?);
    let metadata = reader.metadata().await?;
    let mut state = StateDict::new();
    for (fqn, entry) in metadata.iter() {
        let target = match entry {
            Entry::Tensor(tensor) => Tensor::zeros(tensor.dtype, tensor.shape.clone())?.into(),
            _ => Value::from("untouched"),
        };
        state.insert(Arc::clone(fqn), target);
    }
    Loader::with_settings(Settings::in_group(Arc::clone(group))).load(&mut state, &reader).await?;

    let (mut items, mut data) = (Vec::new(), Vec::new());
    let mut first_at: HashMap<(Place, DType), usize> = HashMap::new();
    for (fqn, entry) in metadata.iter() {
        let Some(value) = state.get(fqn) else { continue };
        let (content, tensor) = match (entry, value) {
            (Entry::Tensor(entry), Value::Tensor(tensor)) => {
                let placement = entry.chunks.get(0).and_then(|chunk| chunk.placement);
                let raw = |placement: &Placement| {
                    let plain = metadata.encoding(placement) == Some(&Encoding::new(Layout::Raw));
                    plain && placement.byte_len > 0
                };
                let place = placement.filter(raw).map(|p| (p.byte_offset, p.byte_len));
                let same_as = place.and_then(|place| {
                    let first = *first_at.entry((place, entry.dtype)).or_insert(items.len());
                    (first < items.len()).then_some(first)
                });
                let (dtype, shape) = (entry.dtype, entry.shape.clone());
                (TorchSaveContent::Tensor { dtype, shape, same_as }, Some(tensor.clone()))
            }
            (_, value) => (TorchSaveContent::Object(value.clone()), None),
        };
        items.push(TorchSaveItem { name: Arc::clone(fqn), path: entry.path().cloned(), content });
        data.push(tensor);
    }
    let form = match form {
        "zip" => TorchSaveForm::default(),
        "zip-2.1" => TorchSaveForm::Zip(RecordSet::Torch2_1),
        "legacy" => TorchSaveForm::Legacy,
        other => return Err(format!("unknown form: {other}").into()),
    };
    let options = TorchSaveOptions::default().with_form(form);
    write(&*storage, &Key::new(new)?, &items, Arc::new(Tensors(data)), &options, None).await?;
    Ok(())
}

/// First byte and length.
type Place = (u64, u64);

/// Tensors in memory, by the position of their item.
#[derive(Debug)]
struct Tensors(Vec<Option<Tensor>>);

#[async_trait]
impl DataSource for Tensors {
    async fn resolve(
        &self,
        item: usize,
        byte_range: Range<u64>,
    ) -> std::result::Result<Payload, CheckpointError> {
        let bytes = self.0.get(item).and_then(|tensor| tensor.as_ref()?.to_vec());
        let bytes = bytes.ok_or(PlanError::no_item(item as u64, self.0.len() as u64))?;
        Ok(Payload::from(bytes).slice(byte_range))
    }

    fn segment_bytes(&self) -> u64 {
        u64::MAX
    }

    fn own_threads(&self) -> Option<Arc<dyn OwnThreads>> {
        None
    }
}
