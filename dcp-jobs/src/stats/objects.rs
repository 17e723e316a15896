//! NaNs and infinities in objects: losses, learning rates, histories, small arrays.

use std::collections::HashMap;
use std::sync::Arc;

use dcp_core::{DType, Value};

use crate::element::numpy::Numpy;
use crate::element::place::Place;
use crate::element::value_difference::step;
use crate::stats::moments::{Moments, Observer};
use crate::stats::report::{BadValue, ObjectStats};

/// The maximum number of NaNs and infinities in objects that are listed.
pub const BAD_VALUES_MAX: usize = 1000;
/// The nesting depth down to which containers are searched.
const DEPTH_MAX: usize = 128;

/// Adds the numbers of the object `key`.
pub(crate) fn look(stats: &mut ObjectStats, key: &Arc<str>, value: &Value) {
    stats.count += 1;
    Walk { stats, key, path: String::new(), observer: Observer::default(), known: HashMap::new() }
        .value(value, 0);
}

struct Walk<'a> {
    stats: &'a mut ObjectStats,
    key: &'a Arc<str>,
    path: String,
    observer: Observer,
    /// Results for arrays that values may refer to again, by address.
    known: HashMap<Place, Found>,
}

/// The counts of one value.
#[derive(Clone, Copy)]
struct Found {
    count: u64,
    nan: u64,
    inf: u64,
    /// The first NaN or infinity: its element, if the value is an array, and its text.
    non_finite: Option<(Option<usize>, &'static str)>,
}

impl Found {
    fn new(
        moments: &Moments,
        per_element: Option<usize>,
        value: impl Fn(usize) -> Option<f64>,
    ) -> Self {
        let first = moments.first_non_finite.and_then(|at| usize::try_from(at).ok());
        let non_finite = first.map(|first| {
            let what = match value(first) {
                Some(x) if x == f64::INFINITY => "inf",
                Some(x) if x == f64::NEG_INFINITY => "-inf",
                _ => "nan",
            };
            (per_element.map(|per_element| first / per_element), what)
        });
        let (count, nan) = (moments.count, moments.nan);
        Self { count, nan, inf: moments.pos_inf + moments.neg_inf, non_finite }
    }
}

impl Walk<'_> {
    fn value(&mut self, value: &Value, depth: usize) {
        if depth > DEPTH_MAX {
            return;
        }
        let depth = depth + 1;
        match value {
            Value::Float(x) => self.floats(&[*x]),
            Value::Complex(re, im) => self.floats(&[*re, *im]),
            Value::List(items)
            | Value::Tuple(items)
            | Value::Set(items)
            | Value::FrozenSet(items) => self.items(items, depth),
            Value::Dict(dict) => {
                for (key, value) in dict.iter() {
                    self.below(&format!("[{}]", step(key)), value, depth);
                }
            }
            Value::Tensor(tensor) => {
                let place = Place::of_tensor(tensor);
                if !self.again(place.as_ref())
                    && let Some(bytes) = tensor.to_vec()
                {
                    self.elements(tensor.dtype(), &bytes, place);
                }
            }
            Value::Object(object) if self.again(Place::of_numpy(object).as_ref()) => {}
            Value::Object(object) => match Numpy::of(object) {
                Some(Numpy::Scalar { value: Some((dtype, bytes)), .. })
                | Some(Numpy::Array { data: Some((dtype, bytes)), .. }) => {
                    self.elements(dtype, &bytes, Place::of_numpy(object));
                }
                Some(_) => {}
                None => {
                    self.items(&object.args, depth);
                    self.items(&object.items, depth);
                    for (key, value) in &object.entries {
                        self.below(&format!("[{}]", step(key)), value, depth);
                    }
                    match &object.state {
                        // The entries of `__dict__` are attributes.
                        Some(Value::Dict(state)) => {
                            for (key, value) in state.iter() {
                                let name = key.as_str().map_or_else(|| step(key), str::to_owned);
                                self.below(&format!(".{name}"), value, depth);
                            }
                        }
                        Some(state) => self.value(state, depth),
                        None => {}
                    }
                }
            },
            Value::Opaque(opaque) => self.value(&opaque.view, depth),
            _ => {}
        }
    }

    fn items(&mut self, items: &[Value], depth: usize) {
        for (at, item) in items.iter().enumerate() {
            // Strings and integers need no path.
            if !matches!(item, Value::Str(_) | Value::Int(_) | Value::None | Value::Bool(_)) {
                self.below(&format!("[{at}]"), item, depth);
            }
        }
    }

    fn below(&mut self, step: &str, value: &Value, depth: usize) {
        let len = self.path.len();
        self.path.push_str(step);
        self.value(value, depth);
        self.path.truncate(len);
    }

    fn floats(&mut self, values: &[f64]) {
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        let moments = self.observer.observe(DType::Float64, &bytes);
        self.add(Found::new(&moments, None, |at| values.get(at).copied()));
    }

    /// Adds an array that was counted before, and returns whether it was.
    fn again(&mut self, place: Option<&Place>) -> bool {
        let found = place.and_then(|place| self.known.get(place).copied());
        found.inspect(|found| self.add(*found)).is_some()
    }

    fn elements(&mut self, dtype: DType, bytes: &[u8], place: Option<Place>) {
        let moments = self.observer.observe(dtype, bytes);
        let numbers = crate::element::numbers::Numbers::new(dtype);
        let one = bytes.len() > numbers.size();
        let found = Found::new(&moments, one.then_some(numbers.per_element()), |at| {
            let element = at / numbers.per_element();
            let start = element * numbers.size();
            let mut values = Vec::new();
            numbers.decode(bytes.get(start..start + numbers.size())?, &mut values);
            values.get(at % numbers.per_element()).copied()
        });
        self.add(found);
        if let Some(place) = place {
            self.known.insert(place, found);
        }
    }

    /// Adds the counts of a value. For an array, the path includes the index of the element.
    fn add(&mut self, found: Found) {
        let stats = &mut *self.stats;
        stats.numbers += found.count;
        stats.nan += found.nan;
        stats.inf += found.inf;
        let Some((element, value)) = found.non_finite else { return };
        if stats.non_finite.len() >= BAD_VALUES_MAX {
            return;
        }
        let mut path = self.path.clone();
        if let Some(element) = element {
            path.push_str(&format!("[{element}]"));
        }
        stats.non_finite.push(BadValue { key: Arc::clone(self.key), path, value });
    }
}

#[cfg(test)]
mod tests {
    use dcp_core::Tensor;
    use dcp_core::value::Dict;

    use super::*;

    #[test]
    fn arrays_that_share_memory_count_wherever_they_are() {
        let bytes: Vec<u8> = [1.0_f32, f32::NAN]
            .iter()
            .flat_map(|x| x.to_le_bytes())
            .cycle()
            .take(1 << 16)
            .collect();
        let tensor = Tensor::replicated(DType::Float32, [1 << 14], bytes).unwrap();
        let mut stats = ObjectStats::default();
        look(&mut stats, &"t".into(), &Value::List(vec![tensor.into(); 3]));
        assert_eq!((stats.numbers, stats.nan), (3 << 14, 3 << 13));
        let paths: Vec<_> = stats.non_finite.iter().map(|bad| &*bad.path).collect();
        assert_eq!(paths, ["[0][1]", "[1][1]", "[2][1]"]);
    }

    #[test]
    fn every_place_is_looked_at() {
        let tensor: Vec<u8> =
            [1.0_f32, f32::INFINITY].into_iter().flat_map(f32::to_le_bytes).collect();
        let tensor = Tensor::replicated(DType::Float32, [2], tensor).unwrap();
        let mut inner = Dict::new();
        inner.insert("t", tensor);
        inner.insert(3_i64, Value::Tuple(vec![Value::Complex(0.0, f64::NAN)]));
        let value = Value::from(Dict::from([
            ("loss", Value::List(vec![1.0.into(), f64::NEG_INFINITY.into()])),
            ("inner", inner.into()),
            ("text", "nan".into()),
        ]));
        let mut stats = ObjectStats::default();
        look(&mut stats, &"train".into(), &value);
        look(&mut stats, &"loss".into(), &f64::NAN.into());
        let found: Vec<_> =
            stats.non_finite.iter().map(|bad| (&*bad.key, &*bad.path, bad.value)).collect();
        assert_eq!(
            found,
            [
                ("train", "[\"loss\"][1]", "-inf"),
                ("train", "[\"inner\"][\"t\"][1]", "inf"),
                ("train", "[\"inner\"][3][0]", "nan"),
                ("loss", "", "nan"),
            ]
        );
        assert_eq!((stats.count, stats.numbers, stats.nan, stats.inf), (2, 7, 2, 2));
    }
}
