//! Compares objects part by part and finds the first difference.

use std::collections::HashSet;

use dcp_core::text::Quoted;
use dcp_core::value::{Dict, Object};
use dcp_core::{Tensor, Value};

use crate::element::compare::{Comparer, Tolerance};
use crate::element::numpy::Numpy;
use crate::element::place::Place;
use crate::element::value_json::{JsonLimits, value_json};

type Json = serde_json::Value;

/// The nesting depth down to which containers are compared by parts; deeper ones are compared by
/// bits.
const DEPTH_MAX: usize = 128;

/// The first difference of two objects.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Differing {
    /// Its path in both objects, such as `["history"][3]`.
    pub(crate) path: String,
    /// A's value there, as JSON; `None` where A has none.
    pub(crate) a: Option<Json>,
    pub(crate) b: Option<Json>,
}

/// Finds the first difference of two values. The order of dicts and sets does not count. Different
/// classes do, and so does a float in place of an integer, unless there is a tolerance.
pub(crate) fn first_difference(
    a: &Value,
    b: &Value,
    tolerance: Option<Tolerance>,
) -> Option<Differing> {
    let mut walk = Walk { tolerance, path: String::new(), equal: HashSet::new() };
    walk.value(a, b, 0).err().map(|differing| *differing)
}

struct Walk {
    tolerance: Option<Tolerance>,
    path: String,
    /// Pairs of long strings and arrays already found equal, because values may refer to them many
    /// times.
    equal: HashSet<(Place, Place)>,
}

type Same = Result<(), Box<Differing>>;

impl Walk {
    fn value(&mut self, a: &Value, b: &Value, depth: usize) -> Same {
        if depth > DEPTH_MAX {
            return self.decide(a.same(b), a, b);
        }
        let depth = depth + 1;
        let places = match (a, b) {
            (Value::Tensor(a), Value::Tensor(b)) => Place::of_tensor(a).zip(Place::of_tensor(b)),
            (Value::Object(a), Value::Object(b)) => Place::of_numpy(a).zip(Place::of_numpy(b)),
            (a, b) => Place::of_text(a).zip(Place::of_text(b)),
        };
        if places.as_ref().is_some_and(|places| self.equal.contains(places)) {
            return Ok(());
        }
        self.compare(a, b, depth)?;
        self.equal.extend(places);
        Ok(())
    }

    fn compare(&mut self, a: &Value, b: &Value, depth: usize) -> Same {
        match (a, b) {
            (Value::Opaque(a), b) => self.value(&a.view, b, depth),
            (a, Value::Opaque(b)) => self.value(a, &b.view, depth),
            (Value::List(x), Value::List(y)) | (Value::Tuple(x), Value::Tuple(y)) => {
                self.items(x, y, depth)
            }
            (Value::Set(x), Value::Set(y)) | (Value::FrozenSet(x), Value::FrozenSet(y)) => {
                self.sets(x, y)
            }
            (Value::Dict(x), Value::Dict(y)) => self.dicts(x, y, depth),
            (Value::Tensor(x), Value::Tensor(y)) => {
                let same = self.tensors(x, y);
                self.decide(same, a, b)
            }
            (Value::Object(x), Value::Object(y)) => self.objects(x, y, depth),
            (Value::Complex(x, y), Value::Complex(z, w)) => {
                let same = self.floats(*x, *z) && self.floats(*y, *w);
                self.decide(same, a, b)
            }
            _ => {
                let same = match (a, b) {
                    (Value::Float(x), Value::Float(y)) => self.floats(*x, *y),
                    (Value::Float(x), Value::Int(n)) | (Value::Int(n), Value::Float(x)) => {
                        self.tolerance.is_some() && self.floats(*x, *n as f64)
                    }
                    (a, b) => a.same(b),
                };
                self.decide(same, a, b)
            }
        }
    }

    fn floats(&self, x: f64, y: f64) -> bool {
        match self.tolerance {
            Some(tolerance) => tolerance.allows(x, y),
            None => x.to_bits() == y.to_bits(),
        }
    }

    fn items(&mut self, a: &[Value], b: &[Value], depth: usize) -> Same {
        for at in 0..a.len().max(b.len()) {
            let len = self.path.len();
            self.path.push_str(&format!("[{at}]"));
            match (a.get(at), b.get(at)) {
                (Some(a), Some(b)) => self.value(a, b, depth)?,
                (a, b) => return Err(self.found(a, b)),
            }
            self.path.truncate(len);
        }
        Ok(())
    }

    fn sets(&mut self, a: &[Value], b: &[Value]) -> Same {
        let keys = |items: &[Value]| -> Dict {
            items.iter().map(|item| (item.clone(), Value::None)).collect()
        };
        let (in_a, in_b) = (keys(a), keys(b));
        if let Some(missing) = a.iter().find(|item| in_b.get_value(item).is_none()) {
            return Err(self.found(Some(missing), None));
        }
        match b.iter().find(|item| in_a.get_value(item).is_none()) {
            Some(missing) => Err(self.found(None, Some(missing))),
            None => Ok(()),
        }
    }

    fn dicts(&mut self, a: &Dict, b: &Dict, depth: usize) -> Same {
        for (key, value) in a.iter() {
            self.below(key, Some(value), b.get_value(key), depth)?;
        }
        for (key, value) in b.iter() {
            if a.get_value(key).is_none() {
                self.below(key, None, Some(value), depth)?;
            }
        }
        Ok(())
    }

    fn below(&mut self, key: &Value, a: Option<&Value>, b: Option<&Value>, depth: usize) -> Same {
        let len = self.path.len();
        self.path.push_str(&format!("[{}]", step(key)));
        match (a, b) {
            (Some(a), Some(b)) => self.value(a, b, depth)?,
            (a, b) => return Err(self.found(a, b)),
        }
        self.path.truncate(len);
        Ok(())
    }

    fn tensors(&self, a: &Tensor, b: &Tensor) -> bool {
        let (Some(x), Some(y)) = (a.to_vec(), b.to_vec()) else { return a.same(b) };
        if a.dtype() != b.dtype() || a.shape() != b.shape() || x.len() != y.len() {
            return false;
        }
        Comparer::new(a.dtype(), b.dtype(), self.tolerance)
            .is_some_and(|mut comparer| comparer.compare(&x, &y).different == 0)
    }

    fn objects(&mut self, a: &Object, b: &Object, depth: usize) -> Same {
        let whole = |object: &Object| Value::Object(Box::new(object.clone()));
        match (Numpy::of(a), Numpy::of(b)) {
            (
                Some(Numpy::Scalar { kind: kind_a, value: Some((dtype, x)) }),
                Some(Numpy::Scalar { kind: kind_b, value: Some((_, y)) }),
            ) if kind_a == kind_b => {
                let comparer = Comparer::new(dtype, dtype, self.tolerance);
                let same = comparer.is_some_and(|mut c| c.compare(&x, &y).different == 0);
                return self.decide(same, &whole(a), &whole(b));
            }
            (
                Some(Numpy::Array { kind: ka, shape: sa, fortran: fa, data: Some((dtype, x)) }),
                Some(Numpy::Array { kind: kb, shape: sb, fortran: fb, data: Some((_, y)) }),
            ) if (&ka, &sa, fa) == (&kb, &sb, fb) => {
                let comparer = Comparer::new(dtype, dtype, self.tolerance);
                let same = comparer.is_some_and(|mut c| c.compare(&x, &y).different == 0);
                return self.decide(same, &whole(a), &whole(b));
            }
            _ => {}
        }
        if a.class != b.class || a.entries.len() != b.entries.len() {
            return Err(self.found(Some(&whole(a)), Some(&whole(b))));
        }
        self.items(&a.args, &b.args, depth)?;
        self.items(&a.items, &b.items, depth)?;
        for ((key, x), (other, y)) in a.entries.iter().zip(&b.entries) {
            self.decide(key.same(other), key, other)?;
            self.below(key, Some(x), Some(y), depth)?;
        }
        match (&a.state, &b.state) {
            (Some(a), Some(b)) => self.value(a, b, depth),
            (None, None) => Ok(()),
            (a, b) => Err(self.found(a.as_ref(), b.as_ref())),
        }
    }

    fn decide(&self, same: bool, a: &Value, b: &Value) -> Same {
        if same { Ok(()) } else { Err(self.found(Some(a), Some(b))) }
    }

    fn found(&self, a: Option<&Value>, b: Option<&Value>) -> Box<Differing> {
        let limits = JsonLimits { values: 50, bytes: 500, ..JsonLimits::default() };
        let json = |value: &Value| value_json(value, &limits);
        Box::new(Differing { path: self.path.clone(), a: a.map(json), b: b.map(json) })
    }
}

/// A dict key as one step of a path.
pub(crate) fn step(key: &Value) -> String {
    match key {
        Value::Str(text) => Quoted(text).to_string(),
        Value::Int(n) => n.to_string(),
        Value::Bool(b) => if *b { "True" } else { "False" }.to_owned(),
        other => format!("<{}>", other.kind()),
    }
}

#[cfg(test)]
mod tests {
    use dcp_core::value::Global;
    use serde_json::json;

    use super::*;

    fn differ(a: impl Into<Value>, b: impl Into<Value>) -> Option<Differing> {
        first_difference(&a.into(), &b.into(), None)
    }

    fn list(items: &[f64]) -> Value {
        Value::List(items.iter().map(|x| Value::Float(*x)).collect())
    }

    #[test]
    fn the_path_leads_to_the_difference() {
        let a = Dict::from([("loss", list(&[1.0, 2.0])), ("name", "x".into())]);
        let b = Dict::from([("name", "x".into()), ("loss", list(&[1.0, 2.5]))]);
        let found = differ(a.clone(), b).unwrap();
        assert_eq!(
            (&*found.path, found.a, found.b),
            ("[\"loss\"][1]", Some(json!(2.0)), Some(json!(2.5)))
        );
        assert_eq!(differ(a.clone(), a.clone()), None);
        let longer = Dict::from([("loss", list(&[1.0, 2.0, 3.0])), ("name", "x".into())]);
        let found = differ(a.clone(), longer).unwrap();
        assert_eq!((&*found.path, found.a, found.b), ("[\"loss\"][2]", None, Some(json!(3.0))));
        let less = Dict::from([("loss", list(&[1.0, 2.0]))]);
        assert_eq!(differ(less, a).unwrap().path, "[\"name\"]");
    }

    #[test]
    fn order_matters_where_it_has_a_meaning() {
        let one_two = vec![Value::Int(1), Value::Int(2)];
        let two_one = vec![Value::Int(2), Value::Int(1)];
        assert!(differ(one_two.clone(), two_one.clone()).is_some());
        let (a, b) = (Value::Set(one_two.clone()), Value::Set(two_one));
        assert_eq!(differ(a.clone(), b), None);
        let found = differ(a, Value::Set(vec![Value::Int(1), Value::Int(3)])).unwrap();
        assert_eq!((found.a, found.b), (Some(json!(2)), None));
        assert!(differ(one_two.clone(), Value::Tuple(one_two)).is_some());
    }

    #[test]
    fn numbers_within_a_tolerance() {
        let tolerance = Some(Tolerance { rtol: 0.0, atol: 0.1 });
        let same = |a: Value, b: Value| first_difference(&a, &b, tolerance).is_none();
        assert!(same(list(&[1.0]), list(&[1.05])));
        assert!(!same(list(&[1.0]), list(&[1.2])));
        assert!(same(1_i64.into(), 1.0.into()));
        assert!(differ(1_i64, 1.0).is_some());
        assert!(differ(f64::NAN, f64::NAN).is_none());
    }

    #[test]
    fn classes_are_compared() {
        let object = |class: &str| Object::new(Global::new("m", class), vec![]);
        assert_eq!(differ(object("A"), object("A")), None);
        assert!(differ(object("A"), object("B")).is_some());
    }
}
