//! Records of trainers beside a checkpoint: metrics, and which checkpoint is the best.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value as Json;

use super::notes::Best;

/// The state of the trainer of transformers, in the folder of a checkpoint and of the run.
pub(super) const TRAINER_STATE: &str = "trainer_state.json";
/// Metrics of one checkpoint that are kept.
const METRICS_MAX: usize = 4096;

/// JSON as Python writes it, with `null` in place of `NaN`, `Infinity` and `-Infinity`, which are no
/// JSON.
pub(super) fn as_json(bytes: &[u8]) -> Cow<'_, [u8]> {
    const WORDS: [&[u8]; 3] = [b"NaN", b"Infinity", b"-Infinity"];
    let (mut json, mut copied): (Vec<u8>, usize) = (Vec::new(), 0);
    let (mut at, mut in_string) = (0, false);
    while let Some(byte) = bytes.get(at) {
        let rest = bytes.get(at..).unwrap_or_default();
        match byte {
            b'\\' if in_string => at += 1,
            b'"' => in_string = !in_string,
            _ if in_string => {}
            b'N' | b'I' | b'-' => {
                if let Some(word) = WORDS.iter().find(|word| rest.starts_with(word)) {
                    json.extend_from_slice(bytes.get(copied..at).unwrap_or_default());
                    json.extend_from_slice(b"null");
                    at += word.len();
                    copied = at;
                    continue;
                }
            }
            _ => {}
        }
        at += 1;
    }
    if copied == 0 {
        return Cow::Borrowed(bytes);
    }
    json.extend_from_slice(bytes.get(copied..).unwrap_or_default());
    Cow::Owned(json)
}

/// The numbers of `.dcp-metrics.json`. Values that are no finite numbers are left out, as unknown ones.
/// `None` for a file that cannot be parsed.
pub(super) fn own_metrics(bytes: &[u8]) -> Option<BTreeMap<String, f64>> {
    #[derive(Deserialize)]
    struct File {
        metrics: Entry,
    }
    serde_json::from_slice::<File>(&as_json(bytes)).map(|file| file.metrics.0).ok()
}

/// The facts of `trainer_state.json` of transformers that decide what is kept.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct TrainerState {
    /// The metrics that were logged at the step of the checkpoint.
    pub(super) metrics: BTreeMap<String, f64>,
    /// The value of the metric that decides which one is the best.
    pub(super) best_metric: Option<f64>,
    /// The path of the best checkpoint.
    pub(super) best_checkpoint: BestPath,
    /// The training step.
    pub(super) step: Option<u64>,
}

/// The value of `best_model_checkpoint`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum BestPath {
    /// The trainer has no best checkpoint: `null`, or no entry.
    #[default]
    None,
    /// A path.
    Path(String),
    /// Neither.
    Other,
}

impl BestPath {
    /// Returns the best checkpoint by the file.
    pub(super) fn into_best(self) -> Best {
        match self {
            Self::None => Best::Paths(Vec::new()),
            Self::Path(path) => Best::Paths(vec![path]),
            Self::Other => {
                Best::Unclear("has a best_model_checkpoint that is no string".to_owned())
            }
        }
    }

    /// The path, if there is one.
    pub(super) fn path(&self) -> Option<&str> {
        match self {
            Self::Path(path) => Some(path),
            _ => None,
        }
    }
}

impl TrainerState {
    /// Parses the file of the checkpoint of `step`; `None` for a file that cannot be parsed.
    pub(super) fn parse(bytes: &[u8], step: Option<u64>) -> Option<Self> {
        let json = as_json(bytes);
        let mut deserializer = serde_json::Deserializer::from_slice(&json);
        let state = StateSeed { step }.deserialize(&mut deserializer).ok()?;
        deserializer.end().is_ok().then_some(state)
    }
}

/// A number, if the value is one.
struct Number(Option<f64>);

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Numbers;
        impl<'de> Visitor<'de> for Numbers {
            type Value = Number;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a value")
            }

            fn visit_f64<E>(self, value: f64) -> Result<Number, E> {
                Ok(Number(Some(value)))
            }

            #[allow(clippy::cast_precision_loss, reason = "a metric is compared, not added up")]
            fn visit_u64<E>(self, value: u64) -> Result<Number, E> {
                Ok(Number(Some(value as f64)))
            }

            #[allow(clippy::cast_precision_loss, reason = "a metric is compared, not added up")]
            fn visit_i64<E>(self, value: i64) -> Result<Number, E> {
                Ok(Number(Some(value as f64)))
            }

            fn visit_bool<E>(self, _: bool) -> Result<Number, E> {
                Ok(Number(None))
            }

            fn visit_str<E>(self, _: &str) -> Result<Number, E> {
                Ok(Number(None))
            }

            fn visit_unit<E>(self) -> Result<Number, E> {
                Ok(Number(None))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Number, A::Error> {
                while seq.next_element::<IgnoredAny>()?.is_some() {}
                Ok(Number(None))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Number, A::Error> {
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(Number(None))
            }
        }
        deserializer.deserialize_any(Numbers)
    }
}

/// The finite numbers of an object, by name.
#[derive(Default)]
struct Entry(BTreeMap<String, f64>);

impl<'de> Deserialize<'de> for Entry {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Entry;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of numbers")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entry, A::Error> {
                let mut numbers = BTreeMap::new();
                while let Some((name, Number(value))) = map.next_entry::<String, Number>()? {
                    let value = value.filter(|value| value.is_finite());
                    if let (Some(value), true) = (value, numbers.len() < METRICS_MAX) {
                        numbers.insert(name, value);
                    }
                }
                Ok(Entry(numbers))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

/// Reads a state, of whose log the entries of one step are kept.
struct StateSeed {
    step: Option<u64>,
}

impl<'de> DeserializeSeed<'de> for StateSeed {
    type Value = TrainerState;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<TrainerState, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for StateSeed {
    type Value = TrainerState;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the state of a trainer")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<TrainerState, A::Error> {
        let mut state = TrainerState::default();
        while let Some(name) = map.next_key::<Cow<'de, str>>()? {
            match &*name {
                "best_metric" => state.best_metric = map.next_value::<Number>()?.0,
                "best_model_checkpoint" => {
                    state.best_checkpoint = match map.next_value()? {
                        Json::Null => BestPath::None,
                        Json::String(path) if path.is_empty() => BestPath::None,
                        Json::String(path) => BestPath::Path(path),
                        _ => BestPath::Other,
                    }
                }
                "global_step" => state.step = map.next_value::<Json>()?.as_u64(),
                "log_history" => {
                    state.metrics = map.next_value_seed(LogSeed { step: self.step })?
                }
                _ => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(state)
    }
}

/// Reads a log, of which the entries of one step are kept.
struct LogSeed {
    step: Option<u64>,
}

impl<'de> DeserializeSeed<'de> for LogSeed {
    type Value = BTreeMap<String, f64>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for LogSeed {
    type Value = BTreeMap<String, f64>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of log entries")
    }

    #[allow(clippy::cast_precision_loss, reason = "steps are far below 2^53")]
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let mut metrics = BTreeMap::new();
        while let Some(Entry(mut entry)) = seq.next_element()? {
            let step = entry.remove("step");
            if step.is_some() && step == self.step.map(|step| step as f64) {
                metrics.extend(entry);
            }
            if metrics.len() > METRICS_MAX {
                break;
            }
        }
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        Ok(metrics)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_python_that_are_no_json_are_null() {
        for (text, json) in [
            (r#"{"a": NaN, "b": [-Infinity, Infinity]}"#, r#"{"a": null, "b": [null, null]}"#),
            (r#"{"NaN \" NaN": -1, "x": "Infinity"}"#, r#"{"NaN \" NaN": -1, "x": "Infinity"}"#),
            ("NaN", "null"),
            ("-", "-"),
            ("\"\\", "\"\\"),
        ] {
            assert_eq!(as_json(text.as_bytes()), json.as_bytes());
        }
    }

    #[test]
    fn one_value_that_is_no_number_takes_no_other_away() {
        let metrics =
            own_metrics(br#"{"metrics": {"acc": 0.5, "loss": NaN, "n": 3, "s": "x", "d": [1]}}"#)
                .unwrap();
        let known: Vec<_> = metrics.iter().map(|(name, value)| (name.as_str(), *value)).collect();
        assert_eq!(known, [("acc", 0.5), ("n", 3.0)]);
        assert_eq!(own_metrics(b"{\"metrics\": [[["), None);
    }

    #[test]
    fn a_trainer_state_has_the_metrics_of_its_step_and_the_best_checkpoint() {
        let state = br#"{
          "best_metric": 0.25, "best_model_checkpoint": "out/checkpoint-500", "epoch": 2.0,
          "log_history": [
            {"loss": 9.0, "epoch": 1.0, "step": 500},
            {"loss": 1.5, "grad_norm": NaN, "epoch": 2.0, "step": 1000},
            {"eval_loss": 0.5, "epoch": 2.0, "step": 1000}
          ], "stateful_callbacks": {"a": {}}
        }"#;
        let read = TrainerState::parse(state, Some(1000)).unwrap();
        let known: Vec<_> = read.metrics.keys().map(String::as_str).collect();
        assert_eq!(known, ["epoch", "eval_loss", "loss"]);
        assert_eq!((read.metrics["loss"], read.best_metric), (1.5, Some(0.25)));
        assert_eq!(read.best_checkpoint.path(), Some("out/checkpoint-500"));
        for hostile in [&b"[[[["[..], b"{\"log_history\": 3}", b"\xff", b""] {
            assert_eq!(TrainerState::parse(hostile, Some(1)), None);
        }
        let deep = "[".repeat(1 << 20);
        let deep = format!("{{\"log_history\": {deep}");
        assert_eq!(TrainerState::parse(deep.as_bytes(), Some(1)), None);
    }
}
