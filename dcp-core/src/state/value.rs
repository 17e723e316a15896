//! Values in a state dict besides tensors: Python's plain data.

mod dict;
mod python_str;

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;

pub use self::dict::Dict;
pub use self::python_str::python_str;
use crate::tensors::tensor::Tensor;

/// A value of a state dict.
///
/// Values are plain data; reading one executes nothing. What Python can express and this tree
/// cannot (shared or cyclic references, unknown classes) is an [`Opaque`], which is displayed as
/// far as it was decoded and written back byte for byte.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Value {
    /// `None`.
    None,
    /// `True` or `False`.
    Bool(bool),
    /// An integer of up to 64 bits.
    Int(i64),
    /// A larger integer.
    BigInt(BigInt),
    /// A float.
    Float(f64),
    /// A complex number: real and imaginary part.
    Complex(f64, f64),
    /// A string.
    Str(Arc<str>),
    /// Immutable bytes.
    Bytes(Bytes),
    /// A `bytearray`.
    ByteArray(Bytes),
    /// A list. Flattening descends into it if it contains tensors or dicts.
    List(Vec<Value>),
    /// A tuple. Always a leaf, even with tensors in it (PyTorch 2.15).
    Tuple(Vec<Value>),
    /// A dict. Flattening always descends into it.
    Dict(Dict),
    /// A set, in stored order.
    Set(Vec<Value>),
    /// A frozen set, in stored order.
    FrozenSet(Vec<Value>),
    /// A tensor, replicated or sharded.
    Tensor(Tensor),
    /// The name of a class or function, such as `torch.float32`; never looked up.
    Global(Global),
    /// An instance of a class, by its parts; never constructed.
    Object(Box<Object>),
    /// An encoded object that is written back unchanged.
    Opaque(Arc<Opaque>),
}

/// The name of a Python class or function.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Global {
    /// The module, with Python 2 names mapped to Python 3's (`__builtin__`).
    pub module: Arc<str>,
    /// The name in the module.
    pub name: Arc<str>,
}

impl Global {
    /// `module.name`.
    #[must_use]
    pub fn new(module: impl Into<Arc<str>>, name: impl Into<Arc<str>>) -> Self {
        Self { module: module.into(), name: name.into() }
    }

    /// Whether it has this module and name.
    #[must_use]
    pub fn is(&self, module: &str, name: &str) -> bool {
        &*self.module == module && &*self.name == name
    }
}

impl fmt::Display for Global {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.module, self.name)
    }
}

/// A Python object by its parts, as in a pickle: the callable and its arguments, and the state and
/// items that are applied afterwards.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Object {
    /// The kind of call that creates it.
    pub made_by: MadeBy,
    /// The class or function; `<call>` without a module if it is the first of the arguments.
    pub class: Global,
    /// The arguments of the call.
    pub args: Vec<Value>,
    /// The argument of `__setstate__`, or the contents of the instance's dict.
    pub state: Option<Value>,
    /// The items to append, for subclasses of list and similar classes.
    pub items: Vec<Value>,
    /// The entries to set, for subclasses of dict.
    pub entries: Vec<(Value, Value)>,
}

/// The kind of call by which Python creates an [`Object`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MadeBy {
    /// `class(*args)`.
    Call,
    /// `class.__new__(class, *args)`.
    New,
    /// `class.__new__(class, *args, **kwargs)`; the dict of keyword arguments is last in the arguments.
    NewWithKeywords,
    /// Unknown: the parts are for display, and cannot be written.
    Unknown,
}

impl Object {
    /// An object created by `class(*args)`, without state or items.
    #[must_use]
    pub fn new(class: Global, args: Vec<Value>) -> Self {
        let (items, entries) = (Vec::new(), Vec::new());
        Self { made_by: MadeBy::Call, class, args, state: None, items, entries }
    }
}

/// An object in its encoded form.
#[derive(Clone, Debug)]
pub struct Opaque {
    /// The encoding: for PyTorch's formats, a whole `torch.save` archive.
    pub encoded: Bytes,
    /// The decoded parts, for display.
    pub view: Value,
}

/// An integer of more than 64 bits: little-endian two's complement of minimal length, as in
/// pickle's `LONG1`.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct BigInt(Bytes);

impl BigInt {
    /// Creates it from little-endian two's complement of any length.
    #[must_use]
    pub fn from_le_bytes(bytes: impl Into<Bytes>) -> Self {
        let bytes = bytes.into();
        let mut len = bytes.len();
        while len > 1 {
            let (last, before) = (bytes[len - 1], bytes[len - 2]);
            let redundant = (last == 0 && before < 0x80) || (last == 0xff && before >= 0x80);
            if !redundant {
                break;
            }
            len -= 1;
        }
        Self(bytes.slice(..len))
    }

    /// The minimal little-endian two's complement.
    #[must_use]
    pub fn to_le_bytes(&self) -> &Bytes {
        &self.0
    }

    /// The number, if it fits.
    #[must_use]
    pub fn to_i64(&self) -> Option<i64> {
        self.to_i128()?.try_into().ok()
    }

    /// The number, if it fits.
    #[must_use]
    pub fn to_u64(&self) -> Option<u64> {
        self.to_i128()?.try_into().ok()
    }

    /// The number, if it fits.
    #[must_use]
    pub fn to_i128(&self) -> Option<i128> {
        let sign = if self.0.last().is_some_and(|b| *b >= 0x80) { 0xff } else { 0 };
        let mut all = [sign; 16];
        all.get_mut(..self.0.len())?.copy_from_slice(&self.0);
        Some(i128::from_le_bytes(all))
    }
}

impl fmt::Display for BigInt {
    /// Decimal up to 4096 bits. Hexadecimal beyond, where decimal conversion takes quadratic time.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let negative = self.0.last().is_some_and(|b| *b >= 0x80);
        let mut magnitude = self.0.to_vec();
        if negative {
            let mut carry = true;
            for byte in &mut magnitude {
                let (flipped, overflow) = (!*byte).overflowing_add(u8::from(carry));
                *byte = flipped;
                carry = overflow;
            }
            if carry {
                magnitude.push(1);
            }
        }
        let mut text = String::new();
        if magnitude.len() > 512 {
            text = magnitude
                .iter()
                .rev()
                .fold(String::from("0x"), |text, b| text + &format!("{b:02x}"));
        } else {
            while magnitude.iter().any(|b| *b != 0) {
                let mut rest = 0_u32;
                for byte in magnitude.iter_mut().rev() {
                    let n = rest << 8 | u32::from(*byte);
                    *byte = u8::try_from(n / 10).unwrap_or(u8::MAX);
                    rest = n % 10;
                }
                text.insert(0, char::from_digit(rest, 10).unwrap_or('?'));
            }
            if text.is_empty() {
                text.push('0');
            }
        }
        f.pad_integral(!negative, "", &text)
    }
}

impl fmt::Debug for BigInt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Value {
    /// Whether two values are equal bit for bit: floats by their bits, tensors by dtype, shape,
    /// shards and bytes.
    #[must_use]
    pub fn same(&self, other: &Value) -> bool {
        let all = |a: &[Value], b: &[Value]| {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.same(b))
        };
        match (self, other) {
            (Self::None, Self::None) => true,
            (Self::Bool(a), Self::Bool(b)) => a == b,
            (Self::Int(a), Self::Int(b)) => a == b,
            (Self::BigInt(a), Self::BigInt(b)) => a == b,
            (Self::Float(a), Self::Float(b)) => a.to_bits() == b.to_bits(),
            (Self::Complex(a, b), Self::Complex(c, d)) => {
                (a.to_bits(), b.to_bits()) == (c.to_bits(), d.to_bits())
            }
            (Self::Str(a), Self::Str(b)) => a == b,
            (Self::Bytes(a), Self::Bytes(b)) | (Self::ByteArray(a), Self::ByteArray(b)) => a == b,
            (Self::List(a), Self::List(b))
            | (Self::Tuple(a), Self::Tuple(b))
            | (Self::Set(a), Self::Set(b))
            | (Self::FrozenSet(a), Self::FrozenSet(b)) => all(a, b),
            (Self::Dict(a), Self::Dict(b)) => {
                a.len() == b.len()
                    && a.iter().zip(b.iter()).all(|((k, v), (l, w))| k.same(l) && v.same(w))
            }
            (Self::Tensor(a), Self::Tensor(b)) => a.same(b),
            (Self::Global(a), Self::Global(b)) => a == b,
            (Self::Object(a), Self::Object(b)) => {
                let state = match (&a.state, &b.state) {
                    (Some(a), Some(b)) => a.same(b),
                    (a, b) => a.is_none() && b.is_none(),
                };
                let entries = a.entries.len() == b.entries.len()
                    && a.entries
                        .iter()
                        .zip(&b.entries)
                        .all(|((k, v), (l, w))| k.same(l) && v.same(w));
                (a.made_by, &a.class) == (b.made_by, &b.class)
                    && all(&a.args, &b.args)
                    && state
                    && all(&a.items, &b.items)
                    && entries
            }
            (Self::Opaque(a), Self::Opaque(b)) => a.encoded == b.encoded,
            _ => false,
        }
    }

    /// The text of a string.
    #[must_use]
    pub fn as_str(&self) -> Option<&str> {
        if let Self::Str(text) = self { Some(text) } else { None }
    }

    /// The value of an integer, if it is an `i64`.
    #[must_use]
    pub fn as_int(&self) -> Option<i64> {
        self.as_i128()?.try_into().ok()
    }

    /// The value of an integer, if it is a `u64`, as states of random generators are.
    #[must_use]
    pub fn as_u64(&self) -> Option<u64> {
        self.as_i128()?.try_into().ok()
    }

    /// The value of an integer of up to 128 bits.
    #[must_use]
    pub fn as_i128(&self) -> Option<i128> {
        match self {
            Self::Int(n) => Some((*n).into()),
            Self::BigInt(n) => n.to_i128(),
            _ => None,
        }
    }

    /// The truth value.
    #[must_use]
    pub fn as_bool(&self) -> Option<bool> {
        if let Self::Bool(value) = self { Some(*value) } else { None }
    }

    /// The bytes of a `bytes` or a `bytearray`.
    #[must_use]
    pub fn as_bytes(&self) -> Option<&Bytes> {
        if let Self::Bytes(bytes) | Self::ByteArray(bytes) = self { Some(bytes) } else { None }
    }

    /// The items of a list or a tuple.
    #[must_use]
    pub fn as_list(&self) -> Option<&[Value]> {
        if let Self::List(items) | Self::Tuple(items) = self { Some(items) } else { None }
    }

    /// The object by its parts.
    #[must_use]
    pub fn as_object(&self) -> Option<&Object> {
        if let Self::Object(object) = self { Some(object) } else { None }
    }

    /// The value of a float.
    #[must_use]
    pub fn as_float(&self) -> Option<f64> {
        if let Self::Float(x) = self { Some(*x) } else { None }
    }

    /// The dict, if the value is one.
    #[must_use]
    pub fn as_dict(&self) -> Option<&Dict> {
        if let Self::Dict(dict) = self { Some(dict) } else { None }
    }

    /// The tensor, if the value is one.
    #[must_use]
    pub fn as_tensor(&self) -> Option<&Tensor> {
        if let Self::Tensor(tensor) = self { Some(tensor) } else { None }
    }

    /// The attributes of an object, or the entries of a dict. `argparse.Namespace` and `types.SimpleNamespace` keep
    /// theirs in the dict of the instance.
    #[must_use]
    pub fn attributes(&self) -> Option<&Dict> {
        match self.view() {
            Self::Dict(dict) => Some(dict),
            Self::Object(object) => object.state.as_ref()?.as_dict(),
            _ => None,
        }
    }

    /// The value to display: the view of an opaque value, the value itself otherwise.
    #[must_use]
    pub fn view(&self) -> &Value {
        if let Self::Opaque(opaque) = self { &opaque.view } else { self }
    }

    /// Python's name of the kind.
    #[must_use]
    pub fn kind(&self) -> &str {
        match self {
            Self::None => "None",
            Self::Bool(_) => "bool",
            Self::Int(_) | Self::BigInt(_) => "int",
            Self::Float(_) => "float",
            Self::Complex(..) => "complex",
            Self::Str(_) => "str",
            Self::Bytes(_) => "bytes",
            Self::ByteArray(_) => "bytearray",
            Self::List(_) => "list",
            Self::Tuple(_) => "tuple",
            Self::Dict(_) => "dict",
            Self::Set(_) => "set",
            Self::FrozenSet(_) => "frozenset",
            Self::Tensor(_) => "tensor",
            Self::Global(_) => "global",
            Self::Object(object) => &object.class.name,
            Self::Opaque(opaque) => opaque.view.kind(),
        }
    }
}

macro_rules! from {
    ($($from:ty => |$x:ident| $into:expr;)*) => {$(
        impl From<$from> for Value {
            fn from($x: $from) -> Self {
                $into
            }
        }
    )*};
}

from! {
    bool => |x| Value::Bool(x);
    () => |_x| Value::None;
    i64 => |x| Value::Int(x);
    i32 => |x| Value::Int(x.into());
    i16 => |x| Value::Int(x.into());
    i8 => |x| Value::Int(x.into());
    u64 => |x| Value::from(i128::from(x));
    i128 => |x| i64::try_from(x).map_or_else(|_| Value::BigInt(x.into()), Value::Int);
    usize => |x| Value::from(x as u64);
    u32 => |x| Value::Int(x.into());
    u16 => |x| Value::Int(x.into());
    u8 => |x| Value::Int(x.into());
    f64 => |x| Value::Float(x);
    f32 => |x| Value::Float(x.into());
    &str => |x| Value::Str(x.into());
    String => |x| Value::Str(x.into());
    Arc<str> => |x| Value::Str(x);
    Bytes => |x| Value::Bytes(x);
    Dict => |x| Value::Dict(x);
    Tensor => |x| Value::Tensor(x);
    Object => |x| Value::Object(Box::new(x));
}

/// A list.
impl<T: Into<Value>> From<Vec<T>> for Value {
    fn from(items: Vec<T>) -> Self {
        Self::List(items.into_iter().map(Into::into).collect())
    }
}

/// `None`, or the value.
impl<T: Into<Value>> From<Option<T>> for Value {
    fn from(value: Option<T>) -> Self {
        value.map_or(Self::None, Into::into)
    }
}

impl From<i128> for BigInt {
    fn from(n: i128) -> Self {
        Self::from_le_bytes(n.to_le_bytes().to_vec())
    }
}

impl From<u64> for BigInt {
    fn from(n: u64) -> Self {
        let mut bytes = n.to_le_bytes().to_vec();
        // The sign.
        bytes.push(0);
        Self::from_le_bytes(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn big_integers_print_in_decimal() {
        let two_to_70 = BigInt::from_le_bytes(vec![0, 0, 0, 0, 0, 0, 0, 0, 0x40, 0, 0]);
        assert_eq!(two_to_70.to_string(), "1180591620717411303424");
        assert_eq!(two_to_70.to_le_bytes().len(), 9);
        assert_eq!(two_to_70.to_i64(), None);
        let minus_one = BigInt::from_le_bytes(vec![0xff, 0xff, 0xff]);
        assert_eq!((minus_one.to_string().as_str(), minus_one.to_i64()), ("-1", Some(-1)));
        assert_eq!(BigInt::from_le_bytes(vec![0, 0x80]).to_string(), "-32768");
    }

    #[test]
    fn dotted_paths_find_what_flattening_names() {
        let mut inner = Dict::from([("a.b", 1), ("a", 2)]);
        inner.insert(7, 3);
        let items = Value::from(vec![Value::from(inner.clone()), Value::from(vec![4])]);
        let mut state = Dict::from([("model", items), ("a", Value::from(inner))]);
        let found = |state: &Dict, name: &str| state.at(name).and_then(Value::as_int);
        assert_eq!(found(&state, "model.0.a.b"), Some(1));
        assert_eq!(found(&state, "model.0.a"), Some(2));
        assert_eq!(found(&state, "model.0.7"), Some(3));
        assert_eq!(found(&state, "model.1.0"), Some(4));
        assert_eq!(found(&state, "a.a.b"), Some(1));
        for absent in ["", "model.00.a", "model.2", "model.0.", "model.0.a.b.c", ".model", "a.+7"] {
            assert!(state.at(absent).is_none(), "{absent}");
        }
        *state.at_mut("model.1.0").unwrap() = 5.into();
        assert_eq!(found(&state, "model.1.0"), Some(5));
    }

    #[test]
    fn values_of_rust_lose_nothing() {
        assert!(Value::from(7_usize).same(&Value::Int(7)));
        assert!(Value::from(i64::MAX as u64).same(&Value::Int(i64::MAX)));
        assert_eq!(format!("{:?}", Value::from(u64::MAX)), "BigInt(18446744073709551615)");
        assert!(Value::from(0.1_f32).same(&Value::Float(f64::from(0.1_f32))));
        assert!(Value::from(()).same(&Value::None));
        assert!(Value::from(None::<i8>).same(&Value::None));
        assert!(Value::from(Some("a")).same(&Value::from("a")));
        let list = Value::List(vec![Value::Int(1), Value::Int(2)]);
        assert!(Value::from(vec![1_u8, 2]).same(&list));
        assert!(Value::from(vec![vec![1_i16, 2]]).same(&Value::List(vec![list])));
    }

    #[test]
    fn a_getter_returns_what_a_value_is_made_from() {
        for n in [0, 1, i64::MAX as u64, i64::MAX as u64 + 1, u64::MAX] {
            assert_eq!(Value::from(n).as_u64(), Some(n));
            assert_eq!(Value::from(n).as_int(), i64::try_from(n).ok());
        }
        let edges = [i128::MIN, i64::MIN.into(), -1, 0, u64::MAX.into(), i128::MAX];
        for n in edges.into_iter().flat_map(|n| [n.saturating_sub(1), n, n.saturating_add(1)]) {
            let value = Value::from(n);
            assert_eq!(value.as_i128(), Some(n));
            assert_eq!(value.as_int(), i64::try_from(n).ok());
            assert_eq!(value.as_u64(), u64::try_from(n).ok());
            assert_eq!(matches!(value, Value::Int(_)), i64::try_from(n).is_ok());
        }
        assert_eq!(Value::from(usize::MAX).as_u64(), Some(usize::MAX as u64));
        assert_eq!(BigInt::from(u64::MAX).to_u64(), Some(u64::MAX));
        let beyond = Value::BigInt(BigInt::from_le_bytes(vec![0x7f; 17]));
        assert_eq!((beyond.as_i128(), beyond.as_u64(), beyond.as_int()), (None, None, None));
        assert_eq!(Value::from(true).as_bool(), Some(true));
        assert_eq!(Value::from(Bytes::from_static(b"a")).as_bytes().unwrap(), "a");
        assert_eq!(Value::from(vec![1, 2]).as_list().unwrap().len(), 2);
        let object = Object::new(Global::new("a", "B"), Vec::new());
        assert!(Value::from(object).as_object().unwrap().class.is("a", "B"));
        assert_eq!(Value::from(1).as_bool(), None);
    }

    #[test]
    fn a_dict_keeps_order_and_kinds_apart() {
        let mut dict = Dict::new();
        dict.insert("1", 1);
        dict.insert(1, 2);
        dict.insert(true, 3);
        assert_eq!(dict.len(), 3);
        assert!(matches!(dict.get("1"), Some(Value::Int(1))));
        assert!(matches!(dict.get_value(&Value::Int(1)), Some(Value::Int(2))));
        dict.insert("1", 4);
        assert!(matches!(dict.iter().next(), Some((Value::Str(_), Value::Int(4)))));
    }
}
