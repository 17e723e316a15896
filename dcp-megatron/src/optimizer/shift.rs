//! Traces the elements of wrong master parameters to their source.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use dcp_core::{CheckpointError, CheckpointMetadata, DType, Region};
use dcp_jobs::Source;
use dcp_jobs::read::TensorReader;

use super::check::{MismatchCause, ParamMismatch, SEGMENT, Wrong};
use super::keys::model_tensors;

/// Consecutive equal elements that identify the origin of a parameter.
const PROBE: u64 = 16;
/// The fewest, for parameters that have no more.
const PROBE_MIN: u64 = 4;
/// Different ones among them, to be looked for in others: norms have few values for long.
const PROBE_KINDS: usize = 4;
/// The longest shift that is looked for, in elements: several times the padding of thousands of
/// buckets.
const SHIFT_MAX: u64 = 4 << 20;
/// Places that are searched in full before a probe counts as a repeating pattern.
const TRIES: usize = 64;
/// Parameters whose elements are searched for in others.
const PROBES_MAX: usize = 4096;

/// Finds the origin of the elements of every wrong parameter.
pub(super) async fn explain(
    source: &Source,
    metadata: &Arc<CheckpointMetadata>,
    wrong: Vec<Wrong<'_>>,
) -> Result<Vec<ParamMismatch>, CheckpointError> {
    let mut found = Vec::with_capacity(wrong.len());
    let mut probes: HashMap<DType, Vec<Probe>> = HashMap::new();
    let mut wanted = 0;
    for (at, one) in wrong.iter().enumerate() {
        let mut cause = MismatchCause::Unknown;
        for region in &one.chunks {
            cause = own(one, region).await?;
            if cause != MismatchCause::Unknown {
                break;
            }
        }
        if cause == MismatchCause::Unknown
            && wanted < PROBES_MAX
            && let Some(elements) = probe(one).await?
        {
            let probe = Probe { at, elements };
            probes.entry(one.pair.dtype()).or_default().push(probe);
            wanted += 1;
        }
        found.push(ParamMismatch {
            param: Arc::clone(&one.pair.param),
            master: Arc::clone(&one.pair.master),
            differing: one.differing,
            elements: one.elements,
            cause,
        });
    }
    if !probes.is_empty() {
        let hits = search(source, metadata, &probes).await?;
        for (at, (param, element)) in hits {
            if let Some(mismatch) = found.get_mut(at) {
                mismatch.cause = MismatchCause::Elsewhere { param, element };
            }
        }
    }
    Ok(found)
}

/// Whether the elements are zeros, or the weight's own from further on.
async fn own(wrong: &Wrong<'_>, region: &Region) -> Result<MismatchCause, CheckpointError> {
    let (pair, size) = (wrong.pair, wrong.pair.dtype().size());
    let total = region.volume();
    let head = total.min(SHIFT_MAX + PROBE);
    let probe = pair.read_master(region, 0..total.min(PROBE)).await?;
    if probe.iter().all(|byte| *byte == 0) && is_zero(wrong, region).await? {
        return Ok(MismatchCause::Zeros);
    }
    if total <= PROBE || is_constant(&probe, size) {
        return Ok(MismatchCause::Unknown);
    }
    let mut tries = 0;
    let mut start = 1;
    while start + PROBE <= head {
        let end = head.min(start + SEGMENT + PROBE);
        let weight = pair.weight_reader.read_range(region, start..end).await?;
        let windows = weight.windows(probe.len()).step_by(size);
        for (offset, _) in (0_u64..).zip(windows).filter(|(_, window)| *window == probe) {
            tries += 1;
            if is_shifted(wrong, region, start + offset).await? {
                return Ok(MismatchCause::Shift { by: start + offset });
            }
            if tries >= TRIES {
                return Ok(MismatchCause::Unknown);
            }
        }
        start = end - PROBE + 1;
    }
    Ok(MismatchCause::Unknown)
}

async fn is_zero(wrong: &Wrong<'_>, region: &Region) -> Result<bool, CheckpointError> {
    let total = region.volume();
    let mut at = 0;
    while at < total {
        let end = total.min(at + SEGMENT);
        let part = wrong.pair.read_master(region, at..end).await?;
        if part.iter().any(|byte| *byte != 0) {
            return Ok(false);
        }
        at = end;
    }
    Ok(true)
}

/// Whether all elements of the master parameter are the weight's from `by` on, as far as it goes.
async fn is_shifted(wrong: &Wrong<'_>, region: &Region, by: u64) -> Result<bool, CheckpointError> {
    let shared = region.volume().saturating_sub(by);
    let mut at = 0;
    while at < shared {
        let end = shared.min(at + SEGMENT);
        let weight = wrong.pair.weight_reader.read_range(region, at + by..end + by).await?;
        if *weight != *wrong.pair.read_master(region, at..end).await? {
            return Ok(false);
        }
        at = end;
    }
    Ok(true)
}

/// The first elements of a wrong master parameter, unless they are those of its weight, which were
/// not moved, or too few, or too much alike to decide.
async fn probe(wrong: &Wrong<'_>) -> Result<Option<Vec<u8>>, CheckpointError> {
    let size = wrong.pair.dtype().size();
    for region in &wrong.chunks {
        let elements = region.volume().min(PROBE);
        if elements < PROBE_MIN {
            continue;
        }
        let (weight, probe) = wrong.pair.read(region, 0..elements).await?;
        let head = usize::try_from(PROBE_MIN).unwrap_or(usize::MAX).saturating_mul(size);
        let moved = weight.get(..head) != probe.get(..head);
        if moved && kinds(&probe, size) >= PROBE_KINDS {
            return Ok(Some(probe));
        }
    }
    Ok(None)
}

/// Counts the distinct elements, of `size` bytes each.
fn kinds(elements: &[u8], size: usize) -> usize {
    elements.chunks_exact(size).collect::<HashSet<_>>().len()
}

fn is_constant(elements: &[u8], size: usize) -> bool {
    let mut all = elements.chunks_exact(size);
    let first = all.next();
    all.all(|element| Some(element) == first)
}

/// Elements of the wrong parameter at position `at`.
#[derive(Debug)]
struct Probe {
    at: usize,
    elements: Vec<u8>,
}

type Hits = HashMap<usize, (Arc<str>, u64)>;

/// Looks through all weights, once, for all probes.
async fn search(
    source: &Source,
    metadata: &Arc<CheckpointMetadata>,
    probes: &HashMap<DType, Vec<Probe>>,
) -> Result<Hits, CheckpointError> {
    let mut hits = Hits::new();
    let wanted: usize = probes.values().map(Vec::len).sum();
    for (entry, fqn, tensor) in model_tensors(metadata) {
        let Some(probes) = probes.get(&tensor.dtype) else { continue };
        if hits.len() == wanted {
            break;
        }
        let reader = TensorReader::new(Arc::clone(&source.reader), Arc::clone(metadata), entry)?;
        let mut by_head: HashMap<&[u8], Vec<&Probe>> = HashMap::new();
        let size = tensor.dtype.size();
        for probe in probes.iter().filter(|probe| !hits.contains_key(&probe.at)) {
            if let Some(head) = probe.elements.get(..2 * size) {
                by_head.entry(head).or_default().push(probe);
            }
        }
        for chunk in tensor.chunks.iter() {
            let Ok(region) = chunk.region() else { continue };
            let total = region.volume();
            let mut at = 0;
            while at < total {
                let end = total.min(at + SEGMENT + PROBE);
                let part = reader.read_range(&region, at..end).await?;
                for (offset, head) in (0_u64..).zip(part.windows(2 * size).step_by(size)) {
                    let Some(same) = by_head.get(head) else { continue };
                    let from = usize::try_from(offset).unwrap_or(usize::MAX).saturating_mul(size);
                    let rest = part.get(from..).unwrap_or_default();
                    for probe in same.iter().filter(|probe| rest.starts_with(&probe.elements)) {
                        hits.entry(probe.at).or_insert_with(|| (Arc::clone(fqn), at + offset));
                    }
                }
                if end == total {
                    break;
                }
                at = end - PROBE;
            }
        }
    }
    Ok(hits)
}
