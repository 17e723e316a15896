//! Tensors of a base that are one parameter in the memory of its model.
//!
//! PEFT changes parameters, and the embedding of many models is their head as well. A checkpoint shows that in one
//! of three ways: both names have the same stored bytes (`torch.save`), both have copies with equal values (PyTorch's
//! DCP stores every name), or only one of the names is there (Hugging Face). What the adapter adds to one name it
//! adds to the other: the twin of a changed tensor gets the same change. What replaces a module (`modules_to_save`)
//! unties it: PEFT's model then has the old parameter under the other name, so both must be in the base.
//!
//! Copies are looked for among matrices outside of numbered layers, and only when such a one changes, because each
//! has to be read. Matrices that were trained apart are never equal in every bit.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;

use dcp_core::metadata::{FileId, TensorEntry};
use dcp_core::text::Quoted;
use dcp_core::{CheckpointError, CheckpointMetadata, PlanError, Region, StorageReader};
use dcp_jobs::read::TensorReader;
use dcp_jobs::{Error, ErrorKind};

use crate::blocks::{SEGMENT, blocks};
use crate::changes::Change;

/// A base, whose tensors are compared.
#[derive(Debug)]
pub(crate) struct Base<'a> {
    reader: &'a Arc<dyn StorageReader>,
    metadata: &'a Arc<CheckpointMetadata>,
    stated_tie: Option<bool>,
    /// The tensors by where the first of their bytes is.
    by_place: HashMap<(FileId, u64), Vec<usize>>,
    /// The matrices outside of numbered layers.
    outside_layers: Vec<usize>,
}

impl<'a> Base<'a> {
    /// `stated_tie` is whether its configuration says that the head is the embedding; `None` where it says nothing.
    pub(crate) fn new(
        reader: &'a Arc<dyn StorageReader>,
        metadata: &'a Arc<CheckpointMetadata>,
        stated_tie: Option<bool>,
    ) -> Self {
        let (mut by_place, mut outside_layers) = (HashMap::<_, Vec<_>>::new(), Vec::new());
        for (position, (fqn, entry)) in metadata.iter().enumerate() {
            let Some(tensor) = entry.as_tensor() else { continue };
            if let Some(place) = first_place(tensor) {
                by_place.entry(place).or_default().push(position);
            }
            if tensor.shape.ndim() == 2 && is_outside_layers(fqn) {
                outside_layers.push(position);
            }
        }
        Self { reader, metadata, stated_tie, by_place, outside_layers }
    }

    fn tensor(&self, position: usize) -> Option<&TensorEntry> {
        self.metadata.at(position).and_then(|(_, entry)| entry.as_tensor())
    }

    fn name(&self, position: usize) -> Cow<'_, str> {
        self.metadata.entry_name(position)
    }

    /// The matrices outside of numbered layers that have the dtype and the shape of the one at `position`, which is
    /// outside as well; otherwise none.
    fn alike(&self, position: usize) -> impl Iterator<Item = usize> {
        let kind = |position| self.tensor(position).map(|tensor| (tensor.dtype, &tensor.shape));
        let is_outside = self.outside_layers.contains(&position);
        let others = self.outside_layers.iter().copied().filter(move |_| is_outside);
        others.filter(move |other| *other != position && kind(*other) == kind(position))
    }

    /// Whether two tensors have the same stored bytes.
    fn share_bytes(&self, one: usize, other: usize) -> bool {
        let (Some(one), Some(other)) = (self.tensor(one), self.tensor(other)) else { return false };
        first_place(one).is_some()
            && (one.dtype, &one.shape, &one.chunks) == (other.dtype, &other.shape, &other.chunks)
    }

    /// Whether two tensors of one dtype and shape have equal elements.
    async fn are_equal(&self, one: usize, other: usize) -> Result<bool, Error> {
        let reader = |position| {
            TensorReader::new(Arc::clone(self.reader), Arc::clone(self.metadata), position)
        };
        let (one, other) = (reader(one)?, reader(other)?);
        let bad = |error| PlanError::from(error).with_fqn(&**one.fqn());
        let whole = Region::full(one.tensor()?.shape.clone());
        let whole = whole.map_err(|error| CheckpointError::from(bad(error)))?;
        for block in blocks(&whole, SEGMENT)? {
            let block = std::slice::from_ref(&block);
            if one.read(block).await? != other.read(block).await? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The other names of the parameter at `position`.
    async fn twins(&self, position: usize) -> Result<Vec<usize>, Error> {
        let place = self.tensor(position).and_then(first_place);
        let at_place = place.and_then(|place| self.by_place.get(&place));
        let others = at_place.into_iter().flatten().copied().filter(|other| *other != position);
        let mut found: Vec<_> = others.filter(|other| self.share_bytes(position, *other)).collect();
        if self.stated_tie != Some(false) {
            for other in self.alike(position) {
                if !found.contains(&other) && self.are_equal(position, other).await? {
                    found.push(other);
                }
            }
        }
        Ok(found)
    }

    /// Refuses to replace one name of a parameter whose other name the base lacks, or its configuration ties.
    fn refuse_untied(&self, position: usize) -> Result<(), Error> {
        let name = self.name(position);
        let is_alone = || self.alike(position).next().is_none();
        let refused = |why: &str| {
            let message = format!("the adapter replaces {} alone, and {why}", Quoted(&name));
            Err(Error::new(ErrorKind::Unsupported, message).with_hint(
                "save the base with a head of its own first, with tie_word_embeddings false in its config.json, \
                 or merge the adapter with PEFT's merge_and_unload",
            ))
        };
        match self.stated_tie {
            Some(false) => Ok(()),
            _ if is_embedding(&name) && is_alone() => {
                refused("the base has no other tensor for a head that is tied to it")
            }
            Some(true) if !is_alone() => {
                refused("config.json of the base ties it to another (tie_word_embeddings)")
            }
            _ => Ok(()),
        }
    }
}

/// Changes the twins of tensors to which the adapter adds. Returns notes about copies.
///
/// # Errors
///
/// [`Unsupported`](ErrorKind::Unsupported) where the adapter changes two names of a parameter, or unties one whose
/// other name is not in the base; and when the base cannot be read.
pub(crate) async fn change_twins(
    base: &Base<'_>,
    changes: &mut HashMap<usize, Change>,
) -> Result<Vec<String>, Error> {
    let mut notes = Vec::new();
    let mut twins = Vec::new();
    let mut positions: Vec<_> = changes.keys().copied().collect();
    positions.sort_unstable();
    for position in positions {
        let Some(change) = changes.get(&position) else { continue };
        if change.unties {
            base.refuse_untied(position)?;
            continue;
        }
        for twin in base.twins(position).await? {
            let (name, other) = (base.name(position), base.name(twin));
            if changes.contains_key(&twin) {
                let message = format!(
                    "the adapter changes {} and {}, which are one parameter of the base",
                    Quoted(&name),
                    Quoted(&other)
                );
                return Err(Error::new(ErrorKind::Unsupported, message)
                    .with_hint("merge the adapter with PEFT's merge_and_unload"));
            }
            if !base.share_bytes(position, twin) {
                let (name, other) = (Quoted(&name), Quoted(&other));
                notes.push(format!("{other} is a copy of {name}, and changes with it"));
            }
            twins.push((twin, change.clone()));
        }
    }
    changes.extend(twins);
    Ok(notes)
}

/// The place of the first stored byte of a tensor.
fn first_place(tensor: &TensorEntry) -> Option<(FileId, u64)> {
    let first = tensor.chunks.iter().next()?.placement?;
    Some((first.file, first.byte_offset))
}

/// Whether no part of a name is a number: embeddings and heads, but no matrices of layers.
fn is_outside_layers(name: &str) -> bool {
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    !name.split('.').any(is_number)
}

/// Whether a tensor is an embedding of tokens, by the names that transformers' models have for it.
fn is_embedding(name: &str) -> bool {
    let module = name.rsplit('.').nth(1).unwrap_or_default();
    let is_other = ["position", "type", "patch"].iter().any(|other| module.contains(other));
    module.contains("embed") && !is_other || ["wte", "shared"].contains(&module)
}
