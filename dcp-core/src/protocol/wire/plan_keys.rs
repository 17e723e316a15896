//! Encodes the table of keys of a save plan: names that repeat parts of each other, and tensors of a
//! few shapes.
//!
//! A name is sent as the parts between its dots, which are numbered in the order of their first
//! use, after those that it begins with as the name before it does. A path is sent as the number of
//! parts that each step has, a tensor by the number of the first equal one.

use std::collections::HashMap;

use super::{MessageReader, MessageWriter, bad};
use crate::error::PlanError;
use crate::plans::plan::{PlanKey, TensorSpec};
use crate::state::path::{PathItem, StatePath};
use crate::tensors::dims::Dims;
use crate::tensors::dtype::DType;

/// Bytes of text in a table, for each byte of the message and for any message. A table with more is
/// sent as it is.
const TEXT_PER_BYTE: usize = 64;
const TEXT_MIN: usize = 1 << 16;

const PLAIN: u64 = 0;
const PARTS: u64 = 1;

const NO_PATH: u64 = 0;
const OWN_PATH: u64 = 1;
const NEW_PATTERN: u64 = 2;
const KNOWN_PATTERN: u64 = 3;

const OBJECT: u64 = 0;
const NEW_SPEC: u64 = 1;
const KNOWN_SPEC: u64 = 2;

fn text_max(message_len: usize) -> usize {
    message_len.saturating_mul(TEXT_PER_BYTE).saturating_add(TEXT_MIN)
}

/// The bytes of text that a key takes.
fn text_len(key: &PlanKey) -> usize {
    let steps = key.path.iter().flat_map(|path| path.iter());
    let step_len = |step: &PathItem| match step {
        PathItem::Key(key) => key.len() + 1,
        PathItem::Index(_) => 1,
    };
    key.fqn.len() + steps.map(step_len).sum::<usize>() + 1
}

pub(super) fn encode(keys: &[PlanKey]) -> Vec<u8> {
    let mut out = MessageWriter(Vec::new());
    out.number(PARTS);
    out.number(keys.len() as u64);
    let mut sender = Sender::default();
    keys.iter().for_each(|key| sender.key(&mut out, key));
    if keys.iter().map(text_len).sum::<usize>() <= text_max(out.0.len()) {
        return out.0;
    }
    let mut out = MessageWriter(Vec::new());
    out.number(PLAIN);
    out.number(keys.len() as u64);
    for key in keys {
        out.text(&key.fqn);
        out.path(key.path.as_ref());
        match &key.tensor {
            None => out.number(OBJECT),
            Some(spec) => {
                out.number(NEW_SPEC);
                out.spec(spec);
            }
        }
    }
    out.0
}

pub(super) fn decode(bytes: &[u8]) -> Result<Vec<PlanKey>, PlanError> {
    let mut input = MessageReader(bytes);
    let mode = input.number()?;
    let count = input.count()?;
    let mut keys = Vec::new();
    match mode {
        PLAIN => {
            for _ in 0..count {
                let (fqn, path) = (input.text()?.into(), input.path()?);
                let tensor = match input.number()? {
                    OBJECT => None,
                    NEW_SPEC => Some(input.spec()?),
                    other => return Err(bad(format!("unknown kind of key {other}"))),
                };
                keys.push(PlanKey { fqn, path, tensor });
            }
        }
        PARTS => {
            let mut receiver = Receiver::default();
            let mut text = text_max(bytes.len());
            for _ in 0..count {
                let key = receiver.key(&mut input)?;
                text = text
                    .checked_sub(text_len(&key))
                    .ok_or_else(|| bad("names that are far longer than the message"))?;
                keys.push(key);
            }
        }
        other => return Err(bad(format!("unknown kind of names {other}"))),
    }
    input.finish()?;
    Ok(keys)
}

impl MessageWriter {
    fn spec(&mut self, spec: &TensorSpec) {
        self.number(spec.sharded.into());
        self.dtype(spec.dtype);
        self.dims(&spec.shape);
    }
}

impl MessageReader<'_> {
    fn spec(&mut self) -> Result<TensorSpec, PlanError> {
        let sharded = match self.number()? {
            0 => false,
            1 => true,
            other => return Err(bad(format!("neither sharded nor replicated but {other}"))),
        };
        Ok(TensorSpec { sharded, dtype: self.dtype()?, shape: self.dims()? })
    }
}

/// Encodes keys.
#[derive(Default)]
struct Sender<'a> {
    parts: HashMap<&'a str, u64>,
    patterns: HashMap<Vec<u64>, u64>,
    specs: HashMap<(DType, bool, &'a Dims), u64>,
    last: Vec<&'a str>,
}

impl<'a> Sender<'a> {
    fn key(&mut self, out: &mut MessageWriter, key: &'a PlanKey) {
        let parts: Vec<&str> = key.fqn.split('.').collect();
        let shared = parts.iter().zip(&self.last).take_while(|(a, b)| a == b).count();
        out.number(shared as u64);
        out.number((parts.len() - shared) as u64);
        for part in parts.iter().skip(shared) {
            let next = self.parts.len() as u64 + 1;
            match self.parts.get(part) {
                Some(known) => out.number(*known),
                None => {
                    self.parts.insert(part, next);
                    out.number(0);
                    out.text(part);
                }
            }
        }
        match &key.path {
            None => out.number(NO_PATH),
            Some(path) => match pattern(path, &parts) {
                None => {
                    out.number(OWN_PATH);
                    out.path(Some(path));
                }
                Some(pattern) => {
                    let next = self.patterns.len() as u64;
                    match self.patterns.get(&pattern) {
                        Some(known) => out.number(KNOWN_PATTERN + known),
                        None => {
                            out.number(NEW_PATTERN);
                            out.dims(&pattern);
                            self.patterns.insert(pattern, next);
                        }
                    }
                }
            },
        }
        match &key.tensor {
            None => out.number(OBJECT),
            Some(spec) => {
                let next = self.specs.len() as u64;
                let by_value = (spec.dtype, spec.sharded, &spec.shape);
                match self.specs.get(&by_value) {
                    Some(known) => out.number(KNOWN_SPEC + known),
                    None => {
                        self.specs.insert(by_value, next);
                        out.number(NEW_SPEC);
                        out.spec(spec);
                    }
                }
            }
        }
        self.last = parts;
    }
}

/// The number of parts of each step of a path, doubled, and one more for an index; `None` when the
/// steps joined by dots are not the parts.
fn pattern(path: &[PathItem], parts: &[&str]) -> Option<Vec<u64>> {
    let mut rest = parts;
    let mut pattern = Vec::with_capacity(path.len());
    for step in path {
        let index;
        let (text, flag) = match step {
            PathItem::Key(key) => (&**key, 0),
            PathItem::Index(number) => {
                index = number.to_string();
                (index.as_str(), 1)
            }
        };
        let count = text.split('.').count();
        let (mine, after) = rest.split_at_checked(count)?;
        if !text.split('.').eq(mine.iter().copied()) {
            return None;
        }
        rest = after;
        pattern.push(2 * count as u64 + flag);
    }
    rest.is_empty().then_some(pattern)
}

/// Decodes keys.
#[derive(Default)]
struct Receiver<'a> {
    parts: Vec<&'a str>,
    patterns: Vec<Dims>,
    specs: Vec<TensorSpec>,
    last: Vec<&'a str>,
}

impl<'a> Receiver<'a> {
    fn key(&mut self, input: &mut MessageReader<'a>) -> Result<PlanKey, PlanError> {
        let shared = input.number()?;
        let shared = usize::try_from(shared).ok().filter(|shared| *shared <= self.last.len());
        self.last.truncate(shared.ok_or_else(|| bad("a name repeats more than there is"))?);
        for _ in 0..input.count()? {
            let part = match input.number()?.checked_sub(1) {
                None => {
                    let part = input.text()?;
                    self.parts.push(part);
                    part
                }
                Some(at) => *known(&self.parts, at)?,
            };
            self.last.push(part);
        }
        let path = match input.number()? {
            NO_PATH => None,
            OWN_PATH => input.path()?,
            NEW_PATTERN => {
                let pattern = input.dims()?;
                let path = self.path(&pattern)?;
                self.patterns.push(pattern);
                Some(path)
            }
            at => Some(self.path(known(&self.patterns, at - KNOWN_PATTERN)?)?),
        };
        let tensor = match input.number()? {
            OBJECT => None,
            NEW_SPEC => {
                let spec = input.spec()?;
                self.specs.push(spec.clone());
                Some(spec)
            }
            at => Some(known(&self.specs, at - KNOWN_SPEC)?.clone()),
        };
        Ok(PlanKey { fqn: self.last.join(".").into(), path, tensor })
    }

    fn path(&self, pattern: &[u64]) -> Result<StatePath, PlanError> {
        let mut rest = self.last.as_slice();
        let steps = pattern.iter().map(|code| {
            let count = usize::try_from(code / 2).ok();
            let split = count.and_then(|count| rest.split_at_checked(count));
            let (mine, after) = split.ok_or_else(|| bad("a path of more parts than its name"))?;
            rest = after;
            match (code % 2, mine) {
                (0, _) => Ok(PathItem::Key(mine.join(".").into())),
                (_, [index]) => {
                    let number = index.parse().map_err(|_| bad("an index that is no number"))?;
                    Ok(PathItem::Index(number))
                }
                _ => Err(bad("an index of several parts")),
            }
        });
        let path = steps.collect::<Result<StatePath, _>>()?;
        if !rest.is_empty() {
            return Err(bad("a path of fewer parts than its name"));
        }
        Ok(path)
    }
}

fn known<T>(all: &[T], at: u64) -> Result<&T, PlanError> {
    let found = usize::try_from(at).ok().and_then(|at| all.get(at));
    found.ok_or_else(|| bad("it refers to what was not sent"))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;

    fn step() -> impl Strategy<Value = PathItem> {
        prop_oneof![
            "[a-c.]{0,4}".prop_map(|key| PathItem::Key(key.into())),
            (0_u64..12).prop_map(PathItem::Index),
        ]
    }

    fn key() -> impl Strategy<Value = PlanKey> {
        let spec = (0_usize..3, prop::collection::vec(0_u64..3, 0..3), any::<bool>());
        let own = "[a-c0-2.]{0,8}";
        (prop::collection::vec(step(), 0..4), own, 0_u8..4, prop::option::of(spec)).prop_map(
            |(steps, own, kind, spec)| PlanKey {
                fqn: if kind == 0 { own.into() } else { PathItem::flat_name(&steps).into() },
                path: (kind < 3).then(|| steps.into()),
                tensor: spec.map(|(dtype, shape, sharded)| TensorSpec {
                    dtype: DType::ALL[dtype],
                    shape: shape.into(),
                    sharded,
                }),
            },
        )
    }

    proptest! {
        #[test]
        fn keys_arrive_as_they_were_sent(keys in prop::collection::vec(key(), 0..30)) {
            prop_assert_eq!(decode(&encode(&keys)), Ok(keys));
        }

        #[test]
        fn damage_is_refused_or_harmless(
            keys in prop::collection::vec(key(), 0..10),
            at in any::<prop::sample::Index>(),
            byte in any::<u8>(),
        ) {
            let mut bytes = encode(&keys);
            let at = at.index(bytes.len());
            bytes[at] = byte;
            if let Ok(keys) = decode(&bytes) {
                prop_assert_eq!(decode(&encode(&keys)), Ok(keys));
            }
        }
    }

    #[test]
    fn long_names_are_sent_as_they_are_and_bombs_are_refused() {
        let long = "x".repeat(4000);
        let key =
            |n: usize| PlanKey { fqn: format!("{long}.{n}").into(), path: None, tensor: None };
        let keys: Vec<PlanKey> = (0..100).map(key).collect();
        let bytes = encode(&keys);
        assert_eq!(u64::from(bytes[0]), PLAIN);
        assert_eq!(decode(&bytes), Ok(keys));

        let mut bomb = MessageWriter(Vec::new());
        bomb.number(PARTS);
        bomb.number(10_000);
        for n in 0..10_000 {
            bomb.number(u64::from(n > 0));
            bomb.number(u64::from(n == 0));
            if n == 0 {
                bomb.number(0);
                bomb.text(&long);
            }
            bomb.number(NO_PATH);
            bomb.number(OBJECT);
        }
        assert!(decode(&bomb.0).is_err());
    }

    #[test]
    fn names_of_layers_take_few_bytes() {
        let key = |n: u64| {
            let name = format!("layers.{}.mlp.part{}.weight", n / 5, n % 5);
            let tensor = TensorSpec {
                dtype: DType::BFloat16,
                shape: [8192, 4096 * (1 + n % 5)].into(),
                sharded: true,
            };
            PlanKey {
                fqn: format!("model.{name}").into(),
                path: Some(Arc::from([
                    PathItem::Key("model".into()),
                    PathItem::Key(name.as_str().into()),
                ])),
                tensor: Some(tensor),
            }
        };
        let keys: Vec<PlanKey> = (0..500).map(key).collect();
        let bytes = encode(&keys);
        assert!(bytes.len() < 8 * 500, "{}", bytes.len());
        assert_eq!(decode(&bytes), Ok(keys));
    }
}
