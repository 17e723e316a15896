//! Writes pickles of protocol 2, byte for byte as CPython's C pickler does.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use dcp_core::FormatError;
use dcp_core::value::BigInt;

use super::names::to_python2;
use super::opcode as op;
use super::repeated::Repeated;

/// The number of items of one `APPENDS` or `SETITEMS`.
pub(super) const BATCH: usize = 1000;

/// Writes the opcodes of protocol 2 and numbers the memo.
///
/// CPython memoizes every string, tuple, list, dict, global and object in order, and writes a
/// reference when it meets the same object again. Which strings are one object depends on the
/// program that created them. This writer has rules instead:
///
/// * globals are shared by name;
/// * [`constant`](Self::constant)s are shared by value, as string literals of a module are;
/// * an [`Arc`] is shared with itself, through [`shared_str`](Self::shared_str), and so are
///   [`Bytes`], through [`shared_bytes`](Self::shared_bytes);
/// * empty strings and bytes, strings of one Latin-1 character, and single bytes are shared by
///   value, as CPython has only one object of each;
/// * all other strings, and all tuples, lists and dicts, are written each time.
///
/// Names are Python 3's. Those that moved since Python 2 are stored under their old names, as with
/// `fix_imports`.
#[derive(Debug)]
pub struct Writer {
    pub(super) out: Vec<u8>,
    pub(super) memo_len: u32,
    /// By module, then by name.
    by_name: HashMap<Box<str>, HashMap<Box<str>, u32>>,
    by_value: HashMap<Box<str>, u32>,
    /// Storage keys, each of which is one string in `torch.save`.
    by_storage_key: HashMap<Box<str>, u32>,
    /// Whether references to storages state that they are not views.
    storage_views: bool,
    /// Whether containers and objects, to which nothing refers, are left out of the memo.
    compact: bool,
    /// Bytes objects of length 1 or 0.
    short_bytes: HashMap<Option<u8>, u32>,
    /// By address; the clone prevents reuse of the address.
    by_identity: HashMap<usize, (u32, Arc<str>)>,
    /// Shared bytes, by address and length.
    bytes_by_identity: HashMap<(usize, usize), (u32, Bytes)>,
    too_long: bool,
}

impl Default for Writer {
    fn default() -> Self {
        Self::new()
    }
}

impl Writer {
    /// Begins a pickle.
    #[must_use]
    pub fn new() -> Self {
        Self {
            out: vec![op::PROTO, 2],
            memo_len: 0,
            by_name: HashMap::new(),
            by_value: HashMap::new(),
            by_storage_key: HashMap::new(),
            storage_views: false,
            compact: false,
            short_bytes: HashMap::new(),
            by_identity: HashMap::new(),
            bytes_by_identity: HashMap::new(),
            too_long: false,
        }
    }

    /// Begins a pickle of the form that `torch.save` used before its zip format.
    pub(crate) fn with_storage_views() -> Self {
        Self { storage_views: true, ..Self::new() }
    }

    /// Begins a pickle that Python loads as the same objects, without the memo entries of containers and
    /// objects, each of which takes up to five bytes.
    pub(crate) fn compact() -> Self {
        Self { compact: true, ..Self::new() }
    }

    /// Ends the pickle.
    ///
    /// # Errors
    ///
    /// When a string had 4 GiB or more, for which protocol 2 has no opcode.
    pub fn finish(mut self) -> Result<Bytes, FormatError> {
        if self.too_long {
            return Err(FormatError::new("pickle", "protocol 2 has no strings of 4 GiB or more"));
        }
        self.out.push(op::STOP);
        Ok(self.out.into())
    }

    /// Writes `None`.
    pub fn none(&mut self) {
        self.out.push(op::NONE);
    }

    /// Writes `True` or `False`.
    pub fn bool(&mut self, value: bool) {
        self.out.push(if value { op::NEWTRUE } else { op::NEWFALSE });
    }

    /// Writes an integer.
    pub fn int(&mut self, value: i64) {
        if let Ok(n) = u8::try_from(value) {
            self.out.extend([op::BININT1, n]);
        } else if let Ok(n) = u16::try_from(value) {
            self.out.push(op::BININT2);
            self.out.extend(n.to_le_bytes());
        } else if let Ok(n) = i32::try_from(value) {
            self.out.push(op::BININT);
            self.out.extend(n.to_le_bytes());
        } else {
            self.big_int(&BigInt::from_le_bytes(value.to_le_bytes().to_vec()));
        }
    }

    /// Writes an unsigned integer.
    pub fn uint(&mut self, value: u64) {
        match i64::try_from(value) {
            Ok(value) => self.int(value),
            Err(_) => {
                let mut bytes = value.to_le_bytes().to_vec();
                bytes.push(0);
                self.big_int(&BigInt::from_le_bytes(bytes));
            }
        }
    }

    /// Writes an integer of more than 64 bits.
    pub fn big_int(&mut self, value: &BigInt) {
        let bytes = value.to_le_bytes();
        match (u8::try_from(bytes.len()), u32::try_from(bytes.len())) {
            (Ok(len), _) => self.out.extend([op::LONG1, len]),
            (_, Ok(len)) => {
                self.out.push(op::LONG4);
                self.out.extend(len.to_le_bytes());
            }
            _ => self.too_long = true,
        }
        self.out.extend_from_slice(bytes);
    }

    /// Writes a float.
    pub fn float(&mut self, value: f64) {
        self.out.push(op::BINFLOAT);
        self.out.extend(value.to_be_bytes());
    }

    /// Writes a string that is not shared.
    pub fn str(&mut self, text: &str) {
        let mut chars = text.chars();
        match (chars.next(), chars.next()) {
            (None, _) => self.constant(text),
            (Some(only), None) if u32::from(only) < 0x100 => self.constant(text),
            _ => {
                self.text(text);
                self.memoize();
            }
        }
    }

    /// Writes a string that is shared with every equal constant.
    pub fn constant(&mut self, text: &str) {
        if let Some(memo) = self.by_value.get(text) {
            return self.get(*memo);
        }
        self.text(text);
        let memo = self.memoize();
        self.by_value.insert(text.into(), memo);
    }

    /// Writes a string that is shared with itself, by its `Arc`.
    pub fn shared_str(&mut self, text: &Arc<str>) {
        if text.chars().nth(1).is_none() {
            return self.str(text);
        }
        let address = Arc::as_ptr(text).cast::<u8>().addr();
        if let Some((memo, _)) = self.by_identity.get(&address) {
            return self.get(*memo);
        }
        let memo = self.memo_len;
        self.str(text);
        self.by_identity.insert(address, (memo, Arc::clone(text)));
    }

    /// Writes a reference to a storage as `torch.save` does: its class, its key, and its length in
    /// elements of the class.
    ///
    /// In zip files, all references to a storage share one key string. Older files have a new
    /// string each time, and state that the storage is not a view of another. In those, storages
    /// without an element type are written as bytes: PyTorch (2.15) writes them unchanged but
    /// cannot load them.
    pub fn storage(&mut self, class: (&str, &str), key: &str, location: &str, len: u64) {
        let class = match class {
            ("torch.storage", "UntypedStorage") if self.storage_views => ("torch", "ByteStorage"),
            class => class,
        };
        let Ok(()) = self.tuple(5 + usize::from(self.storage_views), |writer| {
            writer.constant("storage");
            writer.global(class.0, class.1);
            match writer.by_storage_key.get(key) {
                Some(memo) => writer.get(*memo),
                None => {
                    writer.text(key);
                    let memo = writer.memoize();
                    if !writer.storage_views {
                        writer.by_storage_key.insert(key.into(), memo);
                    }
                }
            }
            writer.constant(location);
            writer.uint(len);
            if writer.storage_views {
                writer.none();
            }
            Ok::<(), std::convert::Infallible>(())
        });
        self.persistent();
    }

    /// Writes bytes, which protocol 2 stores as Latin-1 text to encode.
    pub fn bytes(&mut self, bytes: &[u8]) {
        let short = (bytes.len() <= 1).then(|| bytes.first().copied());
        if let Some(memo) = short.and_then(|short| self.short_bytes.get(&short)) {
            return self.get(*memo);
        }
        if bytes.is_empty() {
            self.global("builtins", "bytes");
            self.empty_tuple();
        } else {
            self.global("_codecs", "encode");
            self.str(&bytes.iter().map(|byte| char::from(*byte)).collect::<String>());
            self.constant("latin1");
            self.end_tuple(2);
        }
        let memo = self.call_kept();
        if let Some(short) = short {
            self.short_bytes.insert(short, memo);
        }
    }

    /// Writes bytes that are shared with themselves, by address.
    pub fn shared_bytes(&mut self, bytes: &Bytes) {
        let place = (bytes.as_ptr().addr(), bytes.len());
        if bytes.len() <= 1 {
            return self.bytes(bytes);
        }
        if let Some((memo, _)) = self.bytes_by_identity.get(&place) {
            return self.get(*memo);
        }
        self.bytes(bytes);
        // The call that creates them was memoized last.
        let memo = self.memo_len.saturating_sub(1);
        self.bytes_by_identity.insert(place, (memo, bytes.clone()));
    }

    /// Writes a name to import.
    pub fn global(&mut self, module: &str, name: &str) {
        let (module, name) = to_python2(module, name);
        if let Some(memo) = self.by_name.get(module).and_then(|names| names.get(name)) {
            return self.get(*memo);
        }
        self.out.push(op::GLOBAL);
        for line in [module, name] {
            self.out.extend_from_slice(line.as_bytes());
            self.out.push(b'\n');
        }
        let memo = self.memoize();
        self.by_name.entry(module.into()).or_default().insert(name.into(), memo);
    }

    /// Writes a global or a constant that is written so often that its number is kept.
    #[inline]
    pub(crate) fn repeated(&mut self, text: &mut Repeated) {
        match text.memo {
            Some(memo) => self.get(memo),
            None => self.first(text),
        }
    }

    #[cold]
    fn first(&mut self, text: &mut Repeated) {
        let (module, name) = match text.module {
            None => {
                self.constant(&text.name);
                text.memo = self.by_value.get(&*text.name).copied();
                return;
            }
            Some(module) => to_python2(module, &text.name),
        };
        self.global(text.module.unwrap_or_default(), &text.name);
        text.memo = self.by_name.get(module).and_then(|names| names.get(name)).copied();
    }

    /// Writes `()`.
    pub fn empty_tuple(&mut self) {
        self.out.push(op::EMPTY_TUPLE);
    }

    /// Writes a tuple of the `len` values that `items` writes.
    ///
    /// # Errors
    ///
    /// Errors of `items`.
    pub fn tuple<E>(
        &mut self,
        len: usize,
        items: impl FnOnce(&mut Self) -> Result<(), E>,
    ) -> Result<(), E> {
        if len > 3 {
            self.out.push(op::MARK);
        }
        items(self)?;
        self.end_tuple(len);
        Ok(())
    }

    pub(super) fn end_tuple(&mut self, len: usize) {
        self.out.push(match len {
            0 => return self.empty_tuple(),
            1 => op::TUPLE1,
            2 => op::TUPLE2,
            3 => op::TUPLE3,
            _ => op::TUPLE,
        });
        self.container();
    }

    /// Writes a tuple of integers.
    pub fn uint_tuple(&mut self, values: &[u64]) {
        let Ok(()) = self.tuple(values.len(), |writer| {
            values.iter().for_each(|value| writer.uint(*value));
            Ok::<(), std::convert::Infallible>(())
        });
    }

    /// Writes a list, each item by `each`.
    ///
    /// # Errors
    ///
    /// Errors of `each`.
    pub fn list<T, E>(
        &mut self,
        items: impl ExactSizeIterator<Item = T>,
        mut each: impl FnMut(&mut Self, T) -> Result<(), E>,
    ) -> Result<(), E> {
        self.out.push(op::EMPTY_LIST);
        self.container();
        if items.len() == 1 {
            for item in items {
                each(self, item)?;
            }
            self.out.push(op::APPEND);
            return Ok(());
        }
        let mut open = 0;
        for item in items {
            if open == 0 {
                self.out.push(op::MARK);
            }
            each(self, item)?;
            open += 1;
            if open == BATCH {
                self.out.push(op::APPENDS);
                open = 0;
            }
        }
        if open > 0 {
            self.out.push(op::APPENDS);
        }
        Ok(())
    }

    /// Writes a dict, each key and value by `each`.
    ///
    /// # Errors
    ///
    /// Errors of `each`.
    pub fn dict<T, E>(
        &mut self,
        entries: impl ExactSizeIterator<Item = T>,
        mut each: impl FnMut(&mut Self, T) -> Result<(), E>,
    ) -> Result<(), E> {
        self.out.push(op::EMPTY_DICT);
        self.container();
        let len = entries.len();
        if len == 1 {
            for entry in entries {
                each(self, entry)?;
            }
            self.out.push(op::SETITEM);
            return Ok(());
        }
        if len == 0 {
            return Ok(());
        }
        // Unlike for lists, an empty batch follows a last batch that is full.
        self.out.push(op::MARK);
        let mut open = 0;
        for entry in entries {
            each(self, entry)?;
            open += 1;
            if open == BATCH {
                self.out.extend([op::SETITEMS, op::MARK]);
                open = 0;
            }
        }
        self.out.push(op::SETITEMS);
        Ok(())
    }

    /// Calls the global below with the arguments on top.
    pub fn call(&mut self) {
        self.out.push(op::REDUCE);
        self.container();
    }

    /// The same; returns the number of the result in the memo, for [`get`](Self::get).
    pub(crate) fn call_kept(&mut self) -> u32 {
        self.out.push(op::REDUCE);
        self.memoize()
    }

    /// Creates an instance of the class below with the arguments on top.
    pub fn new_object(&mut self) {
        self.out.push(op::NEWOBJ);
        self.container();
    }

    /// Applies the state on top to the object below.
    pub fn build(&mut self) {
        self.out.push(op::BUILD);
    }

    /// Replaces the id on top with the object it refers to.
    pub fn persistent(&mut self) {
        self.out.push(op::BINPERSID);
    }

    fn text(&mut self, text: &str) {
        self.utf8(text.as_bytes());
    }

    /// Writes text as Python encodes it, including lone surrogates.
    pub(super) fn utf8(&mut self, text: &[u8]) {
        match u32::try_from(text.len()) {
            Ok(len) => {
                self.out.push(op::BINUNICODE);
                self.out.extend(len.to_le_bytes());
                self.out.extend_from_slice(text);
            }
            Err(_) => self.too_long = true,
        }
    }

    /// Numbers a container or an object, unless the pickle is [`compact`](Self::compact).
    fn container(&mut self) {
        if !self.compact {
            self.memoize();
        }
    }

    pub(super) fn memoize(&mut self) -> u32 {
        let memo = self.memo_len;
        self.indexed(op::BINPUT, op::LONG_BINPUT, memo);
        self.memo_len = memo.saturating_add(1);
        memo
    }

    /// Writes a reference to what has this number.
    pub(crate) fn get(&mut self, memo: u32) {
        self.indexed(op::BINGET, op::LONG_BINGET, memo);
    }

    fn indexed(&mut self, short: u8, long: u8, memo: u32) {
        if let Ok(memo) = u8::try_from(memo) {
            self.out.extend([short, memo]);
        } else {
            self.out.push(long);
            self.out.extend(memo.to_le_bytes());
        }
    }
}
