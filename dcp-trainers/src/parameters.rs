//! The parameters of a model, in the order in which an optimizer numbers them.
//!
//! That order is the order of the model's files without buffers and without the second names of tied weights. Tied weights
//! share a storage where FSDP2 saved them; FSDP1 copies them, so that only their elements show it.

use std::collections::BTreeSet;

use dcp_core::{CheckpointError, DType, Dims};

use crate::copies::Copies;
use crate::leaves::{Files, Leaf, Named};
use crate::units::Parameter;

/// A parameter of the model.
#[derive(Clone)]
pub(crate) struct Name {
    pub(crate) parameter: Parameter,
    pub(crate) shape: Dims,
}

/// The names of parameters, where any second name of tied weights is left out.
pub(crate) struct Names(pub(crate) Vec<Name>);

impl Names {
    /// The possible names of the parameters of a model: without second names by storage, and if there are more than
    /// `count`, also without matrices that are equal to an earlier one on every rank: FSDP1 copies
    /// tied weights before a save.
    pub(crate) async fn candidates(
        model: &Files,
        count: usize,
        copies: &mut Copies,
    ) -> Result<Vec<Self>, CheckpointError> {
        let names = names_of(model);
        let mut kept: Vec<Name> = Vec::new();
        for name in names.iter().filter(|_| names.len() > 1) {
            let mut is_second = false;
            let alike = kept.iter().filter(|one| one.shape == name.shape && name.shape.ndim() > 1);
            for other in alike {
                is_second = is_second || is_equal(model, other, name, copies).await?;
            }
            if !is_second {
                kept.push(name.clone());
            }
        }
        let is_shorter = kept.len() < names.len() && names.len() != count;
        let mut all = vec![Self(names)];
        all.extend(is_shorter.then_some(Self(kept)));
        Ok(all)
    }
}

/// Whether two parameters have the same elements on every rank.
async fn is_equal(
    model: &Files,
    a: &Name,
    b: &Name,
    copies: &mut Copies,
) -> Result<bool, CheckpointError> {
    let of = |name: &Name| model.all.get(&*name.parameter.fqn);
    let (Some(a), Some(b)) = (of(a), of(b)) else { return Ok(false) };
    for (rank, leaf) in &a.by_rank {
        let Some(file) = model.ranks.get(rank) else { return Ok(false) };
        let same = match (leaf, b.by_rank.get(rank)) {
            (Leaf::Shards(one, _, a), Some(Leaf::Shards(other, _, b))) => match (&**a, &**b) {
                ([a], [b]) if one == other => {
                    copies.equal((file, a.entry), (file, b.entry)).await?
                }
                (a, b) => a.is_empty() && b.is_empty(),
            },
            (Leaf::Tensor(one, _, a), Some(Leaf::Tensor(other, _, b))) => {
                one == other && copies.equal((file, *a), (file, *b)).await?
            }
            _ => false,
        };
        if !same {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Whether a dtype has no gradients.
fn is_integer(dtype: DType) -> bool {
    use DType::{Bool, Int8, Int16, Int32, Int64, UInt8, UInt16, UInt32, UInt64};
    matches!(dtype, Bool | Int8 | Int16 | Int32 | Int64 | UInt8 | UInt16 | UInt32 | UInt64)
}

/// The parameters of the model, in order, without second names.
fn names_of(model: &Files) -> Vec<Name> {
    let is_sharded =
        |named: &Named| named.by_rank.values().any(|leaf| matches!(leaf, Leaf::Shards(..)));
    let any = model.all.values().any(is_sharded);
    let (mut names, mut seen) = (Vec::new(), BTreeSet::new());
    for (fqn, named) in &model.all {
        let Some((rank, leaf)) = named.by_rank.first_key_value() else { continue };
        let (dtype, shape, entry) = match leaf {
            Leaf::Shards(dtype, shape, locals) => {
                (*dtype, shape, locals.first().map(|local| local.entry))
            }
            // One rank under FSDP1 has no shards.
            Leaf::Tensor(dtype, shape, entry) if !any => (*dtype, shape, Some(*entry)),
            _ => continue,
        };
        let metadata = model.ranks.get(rank).map(|file| &file.metadata);
        let stored = entry.and_then(|entry| metadata?.at(entry)?.1.as_tensor());
        let place = stored.and_then(|tensor| tensor.chunks.get(0)?.placement);
        let place = place.filter(|place| place.byte_len > 0);
        let is_second =
            place.is_some_and(|place| !seen.insert((place.byte_offset, place.byte_len)));
        if is_second || is_integer(dtype) {
            continue;
        }
        let Some(elements) = shape.checked_volume() else { continue };
        names.push(Name {
            parameter: Parameter { fqn: fqn.to_string(), elements },
            shape: shape.clone(),
        });
    }
    names
}
