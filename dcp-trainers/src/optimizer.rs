//! Optimizer state under the names of parameters, where a file has it under numbers.
//!
//! `optimizer.state_dict()` numbers parameters in the order of the model and has no names. The names are those of the
//! model's files beside it, in their order: without buffers, which are no shards, and without second names of tied
//! weights, which share a storage. If there are as many names as numbers, number `i` is name `i`. Otherwise
//! FSDP1 has numbered its flat buffers, and [`units`] says which parameters are in each. Every shape is
//! compared; where one does not fit, no state is renamed, and the reason is a note: wrong names would train on
//! without an error.
//!
//! Flat values are 1-D pieces, which the ranks of the first replica have in order. A parameter takes its range of them,
//! box by box.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use dcp_core::path::{PathItem, StatePath};
use dcp_core::{CheckpointError, DType, Region, Value};
use dcp_jobs::JobError;
use dcp_jobs::read::{boxes, read_objects};
use dcp_jobs::view::{AssembledBuilder, Piece, PieceFrom};

use crate::leaves::{Files, Leaf, Named};
use crate::merge::{Merge, below};
use crate::messages::bad;
use crate::parameters::{Name, Names};
use crate::units::units;

/// The state of a number: values by name.
type ByNumber<'f> = BTreeMap<u64, Vec<(Arc<str>, &'f Arc<str>, &'f Named)>>;

/// Whether a value is the state of a numbered parameter, or the list of the parameters of a group.
pub(crate) fn is_numbered(named: &Named) -> bool {
    number_of(named).is_some() || group_of(named).is_some()
}

/// The number of the parameter and the name of the value.
fn number_of(named: &Named) -> Option<(u64, Arc<str>)> {
    let [PathItem::Key(state), PathItem::Key(number), PathItem::Key(name)] = &*named.path else {
        return None;
    };
    (&**state == "state").then_some(())?;
    Some((number.parse().ok()?, Arc::clone(name)))
}

/// The group of which this is the list of parameters.
fn group_of(named: &Named) -> Option<u64> {
    match &*named.path {
        [PathItem::Key(groups), PathItem::Index(at), PathItem::Key(params)]
            if &**groups == "param_groups" && &**params == "params" =>
        {
            Some(*at)
        }
        _ => None,
    }
}

/// The numbers of the parameters of each group; `None` where they are named.
pub(crate) async fn numbers(files: &Files) -> Result<Option<Vec<Vec<u64>>>, CheckpointError> {
    let Some((rank, file)) = files.ranks.first_key_value() else { return Ok(None) };
    let lists = files.all.values().filter(|named| group_of(named).is_some());
    let entries = lists.filter_map(|named| match named.by_rank.get(rank) {
        Some(Leaf::Object(entry)) => Some(*entry),
        _ => None,
    });
    let entries: Vec<usize> = entries.collect();
    let mut found = read_objects(&file.source, &file.metadata, &entries).await;
    let mut groups = Vec::new();
    for entry in entries {
        let Some(value) = found.remove(&entry) else { continue };
        let value = value?;
        let list = value.as_list().unwrap_or_default();
        let all: Option<Vec<u64>> = list.iter().map(Value::as_u64).collect();
        let Some(all) = all else { return Ok(None) };
        groups.push(all);
    }
    let is_empty = groups.iter().all(Vec::is_empty);
    Ok((!is_empty).then_some(groups))
}

/// The state by number, as it is renamed.
pub(crate) struct Renaming<'f> {
    files: &'f Files,
    names: Vec<Name>,
    groups: Vec<Vec<u64>>,
    state: ByNumber<'f>,
    /// The parameters of each number.
    of_number: BTreeMap<u64, Vec<usize>>,
    /// The ranks of the first replica, in the order of their pieces.
    pieces: Vec<u32>,
}

impl<'f> Renaming<'f> {
    /// Finds the names of the numbers in `groups`.
    ///
    /// # Errors
    ///
    /// The reason that they are not known, as the end of a sentence.
    pub(crate) fn new(
        files: &'f Files,
        groups: Vec<Vec<u64>>,
        model: &Files,
        names: Names,
    ) -> Result<Self, String> {
        let Names(names) = names;
        let mut state = ByNumber::new();
        for (fqn, named) in &files.all {
            if let Some((number, name)) = number_of(named) {
                state.entry(number).or_default().push((name, fqn, named));
            }
        }
        let mut pieces: Vec<(u64, u32)> = Vec::new();
        for rank in files.ranks.keys() {
            match model.places.get(rank) {
                Some(place) if place.is_first => pieces.push((place.number, *rank)),
                Some(_) => {}
                None => pieces.push((u64::from(*rank), *rank)),
            }
        }
        pieces.sort_unstable();
        let pieces = pieces.into_iter().map(|(_, rank)| rank).collect();
        let mut found = Self { files, names, groups, state, of_number: BTreeMap::new(), pieces };
        found.match_names()?;
        Ok(found)
    }

    fn match_names(&mut self) -> Result<(), String> {
        let count = self.groups.iter().map(Vec::len).sum::<usize>();
        let is_range = |all: &BTreeSet<u64>| all.iter().zip(0..).all(|(number, at)| *number == at);
        let all: BTreeSet<u64> = self.groups.iter().flatten().copied().collect();
        if all.len() != count || !is_range(&all) {
            return Err("its groups do not have each number once".to_owned());
        }
        if self.state.keys().any(|number| !all.contains(number)) {
            return Err("it has numbers that no group has".to_owned());
        }
        if count == self.names.len() {
            self.of_number = (0..).zip(0..count).map(|(number, at)| (number, vec![at])).collect();
            if self.check().is_ok() {
                return Ok(());
            }
        }
        let lens: Vec<u64> = all.iter().filter_map(|number| self.flat_len(*number)).collect();
        if lens.len() == count {
            let parameters: Vec<_> = self.names.iter().map(|name| name.parameter.clone()).collect();
            let ranks = self.pieces.len() as u64;
            if let Some(units) = units(&parameters, &lens, ranks) {
                self.of_number = (0..).zip(units).collect();
                return self.check();
            }
        }
        let names = self.names.len();
        Err(format!(
            "its {count} numbers cannot be matched with the {names} parameters of the model with certainty"
        ))
    }

    /// The length of a flat buffer on each rank.
    fn flat_len(&self, number: u64) -> Option<u64> {
        let first = self.pieces.first()?;
        let values = self.state.get(&number)?.iter();
        values
            .filter_map(|(_, _, named)| match named.by_rank.get(first) {
                Some(Leaf::Tensor(_, shape, _)) if shape.ndim() == 1 => shape.checked_volume(),
                _ => None,
            })
            .max()
    }

    /// Compares the sizes of all state with those of parameters.
    fn check(&self) -> Result<(), String> {
        for (number, values) in &self.state {
            let of = self.of_number.get(number).map(Vec::as_slice).unwrap_or_default();
            let names: Vec<&Name> = of.iter().filter_map(|at| self.names.get(*at)).collect();
            let elements =
                names.iter().fold(0_u64, |sum, name| sum.saturating_add(name.parameter.elements));
            for (value, _, named) in values {
                let fits = match named.by_rank.values().next() {
                    Some(Leaf::Shards(_, shape, _)) => {
                        matches!(*names, [name] if name.shape == *shape)
                    }
                    Some(Leaf::Tensor(_, shape, _)) if shape.ndim() == 0 => true,
                    Some(Leaf::Tensor(_, shape, _)) if matches!(*names, [name] if name.shape == *shape && self.files.ranks.len() == 1) => {
                        true
                    }
                    Some(Leaf::Tensor(..)) => {
                        let held = self
                            .flat(named)
                            .iter()
                            .fold(0, |sum: u64, one| sum.saturating_add(one.2));
                        // Each rank has one chunk, and the last is padded.
                        let padding = self.pieces.len() as u64;
                        held >= elements && held < elements.saturating_add(padding.max(1))
                    }
                    _ => true,
                };
                if !fits {
                    let names: Vec<_> =
                        names.iter().map(|name| name.parameter.fqn.clone()).collect();
                    let names = crate::messages::first_of(&names);
                    return Err(format!(
                        "{value} of number {number} does not have the size of {names}"
                    ));
                }
            }
        }
        Ok(())
    }

    /// The flat pieces of a value, in order: part, entry and elements.
    fn flat(&self, named: &Named) -> Vec<(usize, usize, u64)> {
        let of = |rank: &u32| match named.by_rank.get(rank)? {
            Leaf::Tensor(_, shape, entry) => {
                Some((self.files.ranks.get(rank)?.part, *entry, shape.checked_volume()?))
            }
            _ => None,
        };
        self.pieces.iter().filter_map(of).collect()
    }

    /// Adds the state under names, and the groups with names.
    pub(crate) async fn add(
        &self,
        merge: &mut Merge<'_>,
        view: &mut AssembledBuilder,
    ) -> Result<(), JobError> {
        let root = self.files.group.name.root();
        for (number, values) in &self.state {
            let of = self.of_number.get(number).map(Vec::as_slice).unwrap_or_default();
            for (value, fqn, named) in values {
                let mut before = 0_u64;
                for name in of.iter().filter_map(|at| self.names.get(*at)) {
                    let keys = ["state", &name.parameter.fqn, &**value];
                    let keys: Vec<_> =
                        keys.iter().map(|key| PathItem::Key((*key).into())).collect();
                    let path = below(&root, None, &keys);
                    self.value(merge, view, (fqn, named), name, before, path).await?;
                    before = before.saturating_add(name.parameter.elements);
                }
            }
        }
        for (at, group) in (0..).zip(&self.groups) {
            let of = group.iter().filter_map(|number| self.of_number.get(number)).flatten();
            let names = of.filter_map(|at| self.names.get(*at));
            let names: Vec<Value> =
                names.map(|name| Value::from(name.parameter.fqn.as_str())).collect();
            let keys = [
                PathItem::Key("param_groups".into()),
                PathItem::Index(at),
                PathItem::Key("params".into()),
            ];
            let path = below(&root, None, &keys);
            view.object(PathItem::flat_name(&path), Some(path), Value::List(names))?;
        }
        Ok(())
    }

    /// Adds the part of one parameter in a value; `before` elements of the flat buffer are before it.
    async fn value(
        &self,
        merge: &mut Merge<'_>,
        view: &mut AssembledBuilder,
        (fqn, named): (&str, &Named),
        name: &Name,
        before: u64,
        path: StatePath,
    ) -> Result<(), JobError> {
        let flat_name = PathItem::flat_name(&path);
        let first = named.by_rank.first_key_value();
        match first {
            Some((_, Leaf::Shards(..))) => {
                let (dtype, shape, pieces) = merge.pieces(fqn, named).await?;
                view.tensor(flat_name, Some(path), dtype, shape, pieces)
            }
            Some((_, Leaf::Tensor(dtype, shape, _))) if shape.ndim() > 0 => {
                self.same_replicas(merge, fqn, named).await?;
                let pieces = self.cut(named, name, before)?;
                view.tensor(flat_name, Some(path), *dtype, name.shape.clone(), pieces)
            }
            // Each parameter counts its own steps.
            Some((rank, Leaf::Tensor(dtype, shape, entry))) => {
                self.same_step(merge, fqn, named).await?;
                let part = self.files.ranks.get(rank).map_or(usize::MAX, |file| file.part);
                let whole = Region::full(shape.clone()).map_err(CheckpointError::from)?;
                let pieces = vec![Piece::same(whole.clone(), part, *entry, whole)];
                view.copied_tensor(flat_name, Some(path), *dtype, shape.clone(), pieces)
            }
            Some((rank, Leaf::Object(entry))) => {
                let part = self.files.ranks.get(rank).map_or(usize::MAX, |file| file.part);
                view.pass(flat_name, Some(path), part, *entry)
            }
            None => Ok(()),
        }
    }

    /// The pieces of a parameter in a flat buffer.
    fn cut(&self, named: &Named, name: &Name, before: u64) -> Result<Vec<Piece>, CheckpointError> {
        let (mut pieces, mut start) = (Vec::new(), 0_u64);
        let end = before.saturating_add(name.parameter.elements);
        for (part, entry, len) in self.flat(named) {
            let (from, to) = (start.max(before), start.saturating_add(len).min(end));
            if from < to {
                let mut at = from - start;
                for region in boxes(&name.shape, from - before..to - before) {
                    let next = at.saturating_add(region.volume());
                    let stored = Region::new([at], [region.volume()])?;
                    at = next;
                    let from = PieceFrom::Reshaped { part, entry, region: stored };
                    pieces.push(Piece { region, from });
                }
            }
            start = start.saturating_add(len);
        }
        Ok(pieces)
    }

    /// Compares the flat pieces of other replicas with those of the first.
    async fn same_replicas(
        &self,
        merge: &mut Merge<'_>,
        fqn: &str,
        named: &Named,
    ) -> Result<(), CheckpointError> {
        let count = self.pieces.len();
        let others = self.files.ranks.keys().filter(|rank| !self.pieces.contains(rank));
        for (at, rank) in others.enumerate() {
            let Some(first) = self.pieces.get(at % count.max(1)) else { continue };
            let (Some(Leaf::Tensor(dtype, shape, a)), Some(Leaf::Tensor(other, sizes, b))) =
                (named.by_rank.get(first), named.by_rank.get(rank))
            else {
                continue;
            };
            let (Some(one), Some(two)) = (self.files.ranks.get(first), self.files.ranks.get(rank))
            else {
                continue;
            };
            let same = (dtype, shape) == (other, sizes);
            if !same || !merge.copies.equal((one, *a), (two, *b)).await? {
                let root = self.files.group.name.root();
                merge.findings.differing.insert(format!("{root}.{fqn}"));
            }
        }
        Ok(())
    }

    /// Fails if ranks have different numbers of steps.
    async fn same_step(
        &self,
        merge: &mut Merge<'_>,
        fqn: &str,
        named: &Named,
    ) -> Result<(), CheckpointError> {
        let mut all = named.by_rank.iter();
        let Some((first, Leaf::Tensor(dtype, _, a))) = all.next() else { return Ok(()) };
        let Some(first) = self.files.ranks.get(first) else { return Ok(()) };
        for (rank, leaf) in all {
            let Some(file) = self.files.ranks.get(rank) else { continue };
            let same = match leaf {
                Leaf::Tensor(other, shape, b) if other == dtype && shape.ndim() == 0 => {
                    merge.copies.equal((first, *a), (file, *b)).await?
                }
                _ => false,
            };
            if !same {
                let problem = format!(
                    "{fqn:?} differs from that of rank {}: the files are of different steps",
                    first.rank
                );
                return Err(bad(&file.file, problem));
            }
        }
        Ok(())
    }
}

/// Fails if named state has different numbers of steps on ranks.
pub(crate) async fn check_steps(merge: &mut Merge<'_>) -> Result<(), CheckpointError> {
    let files = merge.files;
    for (fqn, named) in &files.all {
        let is_step = matches!(&*named.path, [.., PathItem::Key(last)] if &**last == "step")
            && named.path.len() > 1;
        let is_scalar = |leaf: &Leaf| matches!(leaf, Leaf::Tensor(DType::Float32, shape, _) if shape.ndim() == 0);
        if is_step && named.by_rank.values().all(is_scalar) {
            let renaming = Renaming {
                files,
                names: Vec::new(),
                groups: Vec::new(),
                state: ByNumber::new(),
                of_number: BTreeMap::new(),
                pieces: Vec::new(),
            };
            renaming.same_step(merge, fqn, named).await?;
        }
    }
    Ok(())
}
