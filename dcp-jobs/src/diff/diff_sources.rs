//! Compares two checkpoints of any formats and shardings: keys, shapes, dtypes, values.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use dcp_core::format::WantedKeys;
use dcp_core::metadata::{Entry, TensorEntry};
use dcp_core::{CheckpointError, CheckpointMetadata};
use dcp_planner::KeyFilter;

use crate::diff::on_ranks::{Extent, gather, share};
use crate::diff::report::{
    Described, DiffReport, Difference, DifferenceKind, Spot, ValueDifference,
};
use crate::diff::segments::{Segments, compare_segment};
use crate::diff::whole::whole_as_in;
use crate::element::compare::{Compared, Comparer, Pair, Tolerance};
use crate::element::value_difference::{Differing, first_difference};
use crate::element::value_json::element_json;
use crate::error::JobError;
use crate::integrity::check::refuse_unsound;
use crate::integrity::checked_source::CheckedSource;
use crate::keys::needed::at_own_positions;
use crate::keys::select::{Chosen, Selection};
use crate::keys::unmatched::{UnmatchedPattern, unmatched_patterns};
use crate::options::JobOptions;
use crate::read::objects::{ObjectBatches, read_objects};
use crate::read::tensor_read::TensorReader;
use crate::source::Source;
use crate::stats::unravel;
use crate::view::{archive, archived_value};

/// The maximum length of a segment, so that the compared bytes stay in the CPU cache.
const SEGMENT_MAX: u64 = 16 << 20;

/// The coverage of a comparison, and its rule for equal values.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct DiffOptions {
    /// The keys of A, and their names in the comparison.
    pub a: Selection,
    /// The keys of B, and their names in the comparison.
    pub b: Selection,
    /// The keys to compare, by their names in the comparison; all by default.
    pub include: KeyFilter,
    /// The keys to leave out; none when `None`.
    pub exclude: Option<KeyFilter>,
    /// The tolerance for values. `None` compares bits: `-0.0` differs from `0.0`, and NaNs are
    /// equal when their bits are. Values of different dtypes are always compared as numbers.
    pub tolerance: Option<Tolerance>,
    /// Compares keys, kinds, shapes and dtypes only, and reads no tensor or object.
    pub keys_only: bool,
    /// Tensors of different dtypes are equal when their values are.
    pub ignore_dtype: bool,
}

impl DiffOptions {
    /// Whether the comparison covers a key, by its name in the comparison.
    #[must_use]
    pub fn compares(&self, name: &str) -> bool {
        covers(&self.include, self.exclude.as_ref(), name)
    }

    /// The keys that the comparison needs of a checkpoint whose keys `side` chooses: `self.a` or
    /// `self.b`.
    #[must_use]
    pub fn needed(&self, side: &Selection) -> WantedKeys {
        let (include, exclude) = (self.include.clone(), self.exclude.clone());
        side.needed_where(move |name| covers(&include, exclude.as_ref(), name))
    }

    fn unmatched(&self, a: &Side, b: &Side) -> Result<Vec<UnmatchedPattern>, JobError> {
        let mut unmatched = Vec::new();
        for (side, selection, name) in [(a, &self.a, "a"), (b, &self.b, "b")] {
            unmatched.extend(selection.unmatched(&side.all)?.into_iter().map(|mut one| {
                one.option = format!("{}-{name}", one.option);
                one
            }));
        }
        let names: Vec<_> = a.names.iter().chain(&b.names).map(|name| (&**name, None)).collect();
        unmatched.extend(unmatched_patterns("include", self.include.patterns(), &names));
        if let Some(exclude) = &self.exclude {
            unmatched.extend(unmatched_patterns("exclude", exclude.patterns(), &names));
        }
        Ok(unmatched)
    }
}

/// Whether a comparison covers a key.
fn covers(include: &KeyFilter, exclude: Option<&KeyFilter>, name: &str) -> bool {
    include.selects(name, None) && !exclude.is_some_and(|filter| filter.selects(name, None))
}

/// Compares two checkpoints and lists their differences, gravest first. Reads both at once, in
/// segments of the same elements, within [`JobOptions::max_memory`]. The ranks of a
/// [group](JobOptions::group) divide the tensors by bytes, and the report of rank 0 is that of one
/// process; the others' is not complete.
///
/// # Errors
///
/// When either is not a checkpoint, is inconsistent or damaged, or a storage fails; when nothing is
/// selected of both. Damage is an error, never a difference.
pub async fn diff(
    a: &Source,
    b: &Source,
    what: &DiffOptions,
    options: &JobOptions,
) -> Result<DiffReport, JobError> {
    let (a, b) = &(whole_as_in(a, b, options).await?, whole_as_in(b, a, options).await?);
    let a = Side::open(a, &what.a, what, options).await?;
    let b = Side::open(b, &what.b, what, options).await?;
    let unmatched = what.unmatched(&a, &b)?;
    let is_empty = a.chosen.is_empty() && b.chosen.is_empty();
    if is_empty && !(a.all.is_empty() && b.all.is_empty()) {
        return Err(JobError::NothingSelected { of: "both checkpoints".to_owned(), unmatched });
    }
    let report = DiffReport { unmatched, ..DiffReport::default() };
    let mut job = Job { what, a: &a, b: &b, report };
    let pairs = job.keys();
    job.report.compared.values = !what.keys_only;
    if what.keys_only {
        job.dtypes_alone(&pairs);
    } else {
        job.tensors(&pairs, options).await?;
        if options.is_coordinator() {
            job.objects(&pairs).await?;
        }
    }
    let report = job.finish();
    drop((a.source.finish().await?, b.source.finish().await?));
    Ok(report)
}

/// One of the two checkpoints.
struct Side {
    source: CheckedSource,
    metadata: Arc<CheckpointMetadata>,
    /// All keys of the checkpoint.
    all: Arc<CheckpointMetadata>,
    /// The keys of the side's selection, by their names in the comparison.
    names: Vec<Arc<str>>,
    /// The pairs that the comparison covers.
    chosen: Vec<Chosen>,
}

impl Side {
    async fn open(
        source: &Source,
        selection: &Selection,
        what: &DiffOptions,
        options: &JobOptions,
    ) -> Result<Self, JobError> {
        let source = CheckedSource::new(source, options);
        let metadata = source.metadata().await?;
        refuse_unsound(&metadata)?;
        let all = source.names().await?;
        let mut chosen = selection.of(&all)?;
        let names = chosen.iter().map(|one| Arc::clone(&one.fqn)).collect();
        chosen.retain(|one| what.compares(&one.fqn));
        let chosen = at_own_positions(chosen, &all, &metadata)?;
        Ok(Self { source, metadata, all, names, chosen })
    }

    fn entry(&self, one: &Chosen) -> Option<&Entry> {
        self.metadata.at(one.entry).map(|(_, entry)| entry)
    }

    fn tensor(&self, one: &Chosen) -> Option<&TensorEntry> {
        self.entry(one)?.as_tensor()
    }

    /// The key's name in the checkpoint, if it differs.
    fn old_name(&self, one: &Chosen) -> Option<Arc<str>> {
        let (fqn, _) = self.metadata.at(one.entry)?;
        (*fqn != one.fqn).then(|| Arc::clone(fqn))
    }

    fn describe(&self, one: &Chosen) -> Described {
        match self.tensor(one) {
            Some(tensor) => {
                Described::Tensor { dtype: tensor.dtype.name(), shape: tensor.shape.to_vec() }
            }
            None => Described::Object,
        }
    }

    fn reader(&self, one: &Chosen) -> Result<TensorReader, CheckpointError> {
        let reader = Arc::clone(&self.source.reader);
        TensorReader::new(reader, Arc::clone(&self.metadata), one.entry)
    }
}

/// A key that both checkpoints have.
#[derive(Clone, Copy)]
struct Both<'a> {
    a: &'a Chosen,
    b: &'a Chosen,
}

struct Job<'a> {
    what: &'a DiffOptions,
    a: &'a Side,
    b: &'a Side,
    report: DiffReport,
}

impl<'a> Job<'a> {
    fn add(&mut self, both: (Option<&Chosen>, Option<&Chosen>), what: DifferenceKind) {
        let Some(key) = both.0.or(both.1).map(|one| Arc::clone(&one.fqn)) else { return };
        let key_a = both.0.and_then(|one| self.a.old_name(one));
        let key_b = both.1.and_then(|one| self.b.old_name(one));
        self.report.differences.push(Difference { key, key_a, key_b, what });
    }

    /// Records keys that only one side has, or whose kind or shape differs; returns the others.
    fn keys(&mut self) -> Vec<Both<'a>> {
        let (a, b) = (self.a, self.b);
        self.report.compared.keys_a = a.chosen.len();
        self.report.compared.keys_b = b.chosen.len();
        let mut in_b: HashMap<&str, &Chosen> =
            b.chosen.iter().map(|one| (&*one.fqn, one)).collect();
        let mut pairs = Vec::new();
        for one in &a.chosen {
            let Some(other) = in_b.remove(&*one.fqn) else {
                self.add((Some(one), None), DifferenceKind::OnlyInA { a: a.describe(one) });
                continue;
            };
            let both = (Some(one), Some(other));
            let (in_a, in_b) = (a.describe(one), b.describe(other));
            match (&in_a, &in_b) {
                (Described::Tensor { shape: x, .. }, Described::Tensor { shape: y, .. }) => {
                    self.report.compared.tensors += 1;
                    if x == y {
                        pairs.push(Both { a: one, b: other });
                    } else {
                        self.add(both, DifferenceKind::Shape { a: in_a, b: in_b });
                    }
                }
                (Described::Object, Described::Object) => {
                    self.report.compared.objects += 1;
                    pairs.push(Both { a: one, b: other });
                }
                _ => self.add(both, DifferenceKind::Kind { a: in_a, b: in_b }),
            }
        }
        for one in b.chosen.iter().filter(|one| in_b.contains_key(&*one.fqn)) {
            self.add((None, Some(one)), DifferenceKind::OnlyInB { b: b.describe(one) });
        }
        pairs
    }

    /// Records differing dtypes when values are not compared.
    fn dtypes_alone(&mut self, pairs: &[Both<'_>]) {
        for both in pairs {
            self.dtype(*both);
        }
    }

    /// Records differing dtypes of tensors that are otherwise equal.
    fn dtype(&mut self, both: Both<'_>) {
        let (Some(a), Some(b)) = (self.a.tensor(both.a), self.b.tensor(both.b)) else { return };
        let comparable = Comparer::new(a.dtype, b.dtype, None).is_some();
        if a.dtype == b.dtype || (self.what.ignore_dtype && comparable) {
            return;
        }
        let (in_a, in_b) = (self.a.describe(both.a), self.b.describe(both.b));
        let what = DifferenceKind::Dtype { a: in_a, b: in_b, comparable };
        self.add((Some(both.a), Some(both.b)), what);
    }

    async fn tensors(&mut self, pairs: &[Both<'_>], options: &JobOptions) -> Result<(), JobError> {
        let segment_bytes = options.segment_bytes(4 * options.parallelism).min(SEGMENT_MAX);
        let mut found: Vec<Compared> = vec![Compared::default(); pairs.len()];
        let mut total = 0_u64;
        for both in pairs {
            if let (Some(a), Some(b)) = (self.a.tensor(both.a), self.b.tensor(both.b)) {
                let bytes = |tensor: &TensorEntry| tensor.byte_len().unwrap_or(0);
                total = total.saturating_add(bytes(a)).saturating_add(bytes(b));
            }
        }
        options.start(total);
        let tolerance = self.what.tolerance;
        let extents = pairs.iter().map(|both| self.extent(*both, segment_bytes));
        let extents: Vec<Extent> = extents.collect();
        let own = match &options.group {
            Some(group) => share(&extents, group.rank(), group.world_size()),
            None => extents.iter().map(|extent| 0..extent.count).collect(),
        };
        let own: Vec<_> = pairs.iter().copied().zip(extents).zip(own).enumerate().collect();
        // A queue and no stream over closures, whose future could not be sent to another thread.
        let (mut own, mut segments) = (own.into_iter(), None::<Segments>);
        let mut running = VecDeque::new();
        let mut bytes = 0_u64;
        loop {
            while running.len() < options.parallelism.max(1) {
                if let Some(segment) = segments.as_mut().and_then(Iterator::next) {
                    // Comparisons are CPU-bound; the tasks run in parallel on a runtime with several
                    // threads.
                    running.push_back(tokio::spawn(compare_segment(segment, tolerance)));
                } else if let Some((pair, ((both, extent), own))) = own.next() {
                    segments = self.segments(pair, both, own, extent.step)?;
                } else {
                    break;
                }
            }
            let Some(done) = running.pop_front() else { break };
            let done = done.await;
            options.check_group()?;
            let (pair, start, compared, read) =
                done.map_err(|error| JobError::task("compares elements", &error))??;
            if let Some(found) = found.get_mut(pair) {
                found.merge(compared, start);
            }
            options.advance(read);
            bytes = bytes.saturating_add(read);
        }
        if let Some(group) = &options.group {
            match gather(group, &found, bytes).await? {
                Some(of_all) => (found, bytes) = of_all,
                // Rank 0 reports.
                None => return Ok(()),
            }
        }
        self.report.compared.bytes = bytes;
        let mut equal = Vec::new();
        for (both, found) in pairs.iter().zip(found) {
            let Some(tensor) = self.a.tensor(both.a) else { continue };
            let Some(other) = self.b.tensor(both.b) else { continue };
            if found.different == 0 {
                self.dtype(*both);
                equal.push(*both);
                continue;
            }
            let what = DifferenceKind::Values(Box::new(ValueDifference {
                dtype_a: tensor.dtype.name(),
                dtype_b: other.dtype.name(),
                shape: tensor.shape.to_vec(),
                count: found.count,
                different: found.different,
                nan_mismatches: found.nan_mismatches,
                max_abs: found.max_abs,
                max_rel: found.max_rel,
                first: found.first.map(|pair| spot(pair, tensor)),
                largest: found.largest.map(|pair| spot(pair, tensor)),
            }));
            self.add((Some(both.a), Some(both.b)), what);
        }
        self.quantizers(equal).await
    }

    /// Compares the scales and zero points of quantized tensors whose elements are equal. Only their
    /// archives have them.
    async fn quantizers(&mut self, equal: Vec<Both<'_>>) -> Result<(), JobError> {
        for both in equal {
            let (Some(a), Some(b)) = (self.a.tensor(both.a), self.b.tensor(both.b)) else {
                continue;
            };
            if !a.dtype.is_quantized() || a.dtype != b.dtype {
                continue;
            }
            let places = archive(&self.a.metadata, a).zip(archive(&self.b.metadata, b));
            let Some((at_a, at_b)) = places else {
                let problem = "its scales are not compared: it is not stored in one archive";
                self.report.notes.push(format!("{:?}: {problem}", both.a.fqn));
                continue;
            };
            let (fqn, of_a, of_b) = (&*both.a.fqn, self.a, self.b);
            let a = archived_value(&of_a.source, &of_a.metadata, fqn, at_a).await?;
            let b = archived_value(&of_b.source, &of_b.metadata, fqn, at_b).await?;
            if let Some(found) = first_difference(&a, &b, self.what.tolerance) {
                self.add((Some(both.a), Some(both.b)), object_difference(found));
            }
        }
        Ok(())
    }

    /// The elements of a pair of tensors; none when there are no values to compare.
    fn extent(&self, both: Both<'_>, segment_bytes: u64) -> Extent {
        let tensors = self.a.tensor(both.a).zip(self.b.tensor(both.b));
        let comparable = tensors.filter(|(a, b)| Comparer::new(a.dtype, b.dtype, None).is_some());
        let Some((a, b)) = comparable else { return Extent::default() };
        let sizes = (a.dtype.size() as u64, b.dtype.size() as u64);
        Extent {
            count: a.shape.checked_volume().unwrap_or(0),
            step: (segment_bytes / sizes.0.max(sizes.1)).max(1),
            element_bytes: sizes.0 + sizes.1,
        }
    }

    /// The segments of `elements` of a pair of tensors, of `step` elements each.
    fn segments(
        &self,
        pair: usize,
        both: Both<'_>,
        elements: Range<u64>,
        step: u64,
    ) -> Result<Option<Segments>, CheckpointError> {
        if elements.is_empty() {
            return Ok(None);
        }
        let (a, b) = (Arc::new(self.a.reader(both.a)?), Arc::new(self.b.reader(both.b)?));
        Ok(Some(Segments { pair, a, b, next: elements.start, end: elements.end, step }))
    }

    async fn objects(&mut self, pairs: &[Both<'_>]) -> Result<(), JobError> {
        let both_objects = |both: &&Both<'_>| self.a.tensor(both.a).is_none();
        let pairs: Vec<Both<'_>> = pairs.iter().filter(both_objects).copied().collect();
        let of_a: Vec<usize> = pairs.iter().map(|both| both.a.entry).collect();
        let by_a: HashMap<usize, Both<'_>> =
            pairs.iter().map(|both| (both.a.entry, *both)).collect();
        let (source, metadata) = (Source::clone(&self.a.source), Arc::clone(&self.a.metadata));
        let mut batches = ObjectBatches::new(&source, &metadata, &of_a);
        while let Some(batch) = batches.next().await {
            let of_b: Vec<usize> =
                batch.iter().filter_map(|(at, _)| Some(by_a.get(at)?.b.entry)).collect();
            let mut in_b = read_objects(&self.b.source, &self.b.metadata, &of_b).await;
            for (at, a) in batch {
                let Some(both) = by_a.get(&at) else { continue };
                let (a, b) = (a?, in_b.remove(&both.b.entry).transpose()?);
                let Some(b) = b else { continue };
                if let Some(found) = first_difference(&a, &b, self.what.tolerance) {
                    self.add((Some(both.a), Some(both.b)), object_difference(found));
                }
            }
        }
        Ok(())
    }

    fn finish(mut self) -> DiffReport {
        let report = &mut self.report;
        report.differences.sort_by(|x, y| {
            let ((a, n, x), (b, m, y)) = (x.what.severity(), y.what.severity());
            a.cmp(&b).then(m.cmp(&n)).then(y.total_cmp(&x))
        });
        for difference in &report.differences {
            let counts = &mut report.counts;
            *match &difference.what {
                DifferenceKind::Kind { .. } => &mut counts.kind,
                DifferenceKind::Shape { .. } => &mut counts.shape,
                DifferenceKind::OnlyInA { .. } => &mut counts.only_in_a,
                DifferenceKind::OnlyInB { .. } => &mut counts.only_in_b,
                DifferenceKind::Values(_) => &mut counts.values,
                DifferenceKind::Object { .. } => &mut counts.object,
                DifferenceKind::Dtype { .. } => &mut counts.dtype,
            } += 1;
        }
        report.equal = report.differences.is_empty();
        self.report
    }
}

fn object_difference(found: Differing) -> DifferenceKind {
    let missing = match (&found.a, &found.b) {
        (None, _) => Some("a"),
        (_, None) => Some("b"),
        _ => None,
    };
    let (a, b) = (found.a.unwrap_or_default(), found.b.unwrap_or_default());
    DifferenceKind::Object { path: found.path, a, b, missing }
}

fn spot(pair: Pair, tensor: &TensorEntry) -> Spot {
    let index = unravel(pair.at, &tensor.shape);
    Spot { index, a: element_json(&pair.a), b: element_json(&pair.b) }
}
