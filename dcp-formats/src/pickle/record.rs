//! Records: the instances that make up most of an index, skipped by one step of the machine and
//! read again where their values are needed.
//!
//! An index of half a million chunks has forty million opcodes, and nearly all of them are in three
//! kinds of instances whose attributes are numbers, names and sizes. A record takes eight bytes and
//! those of a reference, whatever it has inside.
//!
//! The machine, when it has read the reference to a class, looks ahead ([`Pickle::find_record`]): if the
//! opcodes up to the `BUILD` have exactly the form in which Python writes such an instance, it keeps their
//! position and continues behind them. Anything else, such as a mark, a nested object or an opcode of
//! another protocol, is no record and is executed opcode by opcode, so the result never depends on the
//! look-ahead. Values are decoded again each time they are needed ([`Pickle::each_field`]).
//!
//! Invariant: the numbers that a skipped record would have put into the memo are counted as the machine
//! counts them, so that later references by number lead to the same values. Other values may refer to
//! strings inside of a record, which is why those are handed to the memo at once.

use dcp_core::Dims;

use super::arena::{Node, NodeId, Pickle, RECORDS};
use super::memo::Memo;
use super::opcode as op;

/// The most fields of a record. The classes of an index have four at most.
const FIELDS_MAX: usize = 8;

/// The bits of a record's position, which allow a pickle of 256 TiB.
const POSITION_BITS: u32 = 48;

/// An instance of which only the position after the reference to its class is kept, in the lower
/// [`POSITION_BITS`], and the number of the class among the globals.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Record(u64);

/// A record that was recognized.
pub(super) struct Found {
    pub(super) record: Record,
    /// The length after the reference to its class.
    pub(super) byte_len: usize,
    /// The number of the next value that is put into the memo.
    pub(super) memo: usize,
}

/// A value in a record.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Field<'a> {
    None,
    Int(i64),
    Str(&'a str),
    Size(Sizes<'a>),
    /// A string or an integer from before the record.
    Node(NodeId),
}

/// The numbers of a `torch.Size`, none of them negative, as opcodes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes<'a> {
    encoded: &'a [u8],
    pub(crate) len: usize,
}

impl<'a> Sizes<'a> {
    #[inline]
    pub(crate) fn numbers(self) -> impl Iterator<Item = u64> {
        let mut rest = self.encoded;
        std::iter::from_fn(move || {
            let (number, after) = integer(rest)?;
            rest = after;
            u64::try_from(number).ok()
        })
    }
}

impl Record {
    /// `None` where one of the two has too many bits.
    fn new(class: u32, at: usize) -> Option<Self> {
        let class = u64::from(u16::try_from(class).ok()?);
        let at = u64::try_from(at).ok().filter(|at| *at < 1 << POSITION_BITS)?;
        Some(Self(class << POSITION_BITS | at))
    }

    /// The number of the class among [`Pickle::globals`].
    pub(crate) fn class(self) -> usize {
        (self.0 >> POSITION_BITS) as usize
    }

    fn at(self) -> usize {
        (self.0 & ((1 << POSITION_BITS) - 1)) as usize
    }
}

impl<'a> Pickle<'a> {
    /// The record of a node.
    pub(crate) fn record(&self, id: NodeId) -> Option<Record> {
        self.records.get(id.index().checked_sub(RECORDS)?).copied()
    }

    /// Passes the fields of a record to `each`, in their order, until it returns false.
    #[inline]
    pub(crate) fn each_field(
        &self,
        record: Record,
        mut each: impl FnMut(NodeId, Field<'a>) -> bool,
    ) {
        let input = self.input.get(record.at()..).unwrap_or_default();
        // The machine has found that it is a record, and compared its numbers with the memo's.
        let mut scan = Scan::<'_, KNOWN> { rest: input, memo: 0 };
        if scan.begin().is_some() {
            while let Some(Some((name, field))) = scan.field(&self.memo, self, |_, _| ()) {
                if !each(name, field) {
                    return;
                }
            }
        }
    }

    /// Recognizes the record that follows a reference to its class. `each_str` gets the strings that
    /// it puts into the memo.
    pub(super) fn find_record(
        &self,
        class: u32,
        at: usize,
        memo: &Memo,
        mut each_str: impl FnMut(usize, &'a str),
    ) -> Option<Found> {
        let input = self.input.get(at..)?;
        let first = u32::try_from(memo.len()).ok().filter(|_| memo.len() == memo.end())?;
        let mut scan = Scan::<'_, NEW> { rest: input, memo: first };
        scan.begin()?;
        let mut count = 0;
        while let Some((name, _)) = scan.field(memo, self, &mut each_str)? {
            self.str(name)?;
            count += 1;
        }
        let found = Found {
            record: Record::new(class, at)?,
            byte_len: input.len() - scan.rest.len(),
            memo: scan.memo as usize,
        };
        (count <= FIELDS_MAX).then_some(found)
    }
}

/// Reads an integer opcode of up to 64 bits.
#[inline]
fn integer(bytes: &[u8]) -> Option<(i64, &[u8])> {
    match *bytes {
        [op::BININT1, n, ref rest @ ..] => Some((n.into(), rest)),
        [op::BININT2, a, b, ref rest @ ..] => Some((u16::from_le_bytes([a, b]).into(), rest)),
        [op::BININT, a, b, c, d, ref rest @ ..] => {
            Some((i32::from_le_bytes([a, b, c, d]).into(), rest))
        }
        [op::LONG1, len @ 1..=8, ref rest @ ..] => {
            let (digits, rest) = rest.split_at_checked(usize::from(len))?;
            let negative = digits.last().is_some_and(|last| *last >= 0x80);
            let mut all = if negative { [0xff; 8] } else { [0; 8] };
            all.get_mut(..digits.len())?.copy_from_slice(digits);
            Some((i64::from_le_bytes(all), rest))
        }
        _ => None,
    }
}

/// A position in a record. Every method returns `None` where the bytes are not of a record.
///
/// The opcodes that two picklers write, those of protocol 2 and of protocol 4 and later, are
/// compared several at a time.
///
/// One that is known to be a record is read `KNOWN`: without comparing the numbers that it puts into
/// the memo.
struct Scan<'a, const IS_KNOWN: bool> {
    rest: &'a [u8],
    /// The number of the next value that is put into the memo; any for a known record.
    memo: u32,
}

/// A record that is recognized.
const NEW: bool = false;
/// A record that was recognized before.
const KNOWN: bool = true;

impl<'a, const IS_KNOWN: bool> Scan<'a, IS_KNOWN> {
    /// Whether these opcodes may put values into the memo under these numbers, which follow each
    /// other.
    #[inline]
    fn are_next<const N: usize>(&self, numbers: [[u8; 4]; N]) -> bool {
        let next = |(n, number): (u32, [u8; 4])| {
            Some(u32::from_le_bytes(number)) == self.memo.checked_add(n)
        };
        IS_KNOWN || (0..).zip(numbers).all(next)
    }

    /// Counts values that were put into the memo.
    #[inline]
    fn count(&mut self, len: u32) -> Option<()> {
        if !IS_KNOWN {
            self.memo = self.memo.checked_add(len)?;
        }
        Some(())
    }

    #[inline]
    fn expect(&mut self, opcode: u8) -> Option<()> {
        let (first, rest) = self.rest.split_first()?;
        self.rest = rest;
        (*first == opcode).then_some(())
    }

    /// Passes over the opcode that puts the last value into the memo, if there is one. Returns
    /// whether there is.
    #[inline]
    fn put(&mut self) -> Option<bool> {
        let (index, rest) = match *self.rest {
            [op::MEMOIZE, ref rest @ ..] => (self.memo, rest),
            [op::BINPUT, index, ref rest @ ..] => (index.into(), rest),
            [op::LONG_BINPUT, a, b, c, d, ref rest @ ..] => {
                (u32::from_le_bytes([a, b, c, d]), rest)
            }
            _ => return Some(false),
        };
        if !IS_KNOWN && index != self.memo {
            return None;
        }
        self.rest = rest;
        self.count(1)?;
        Some(true)
    }

    #[inline]
    fn begin(&mut self) -> Option<()> {
        use op::{EMPTY_DICT, EMPTY_TUPLE, LONG_BINPUT, MARK, MEMOIZE, NEWOBJ};
        self.rest = match *self.rest {
            [EMPTY_TUPLE, NEWOBJ, MEMOIZE, EMPTY_DICT, MEMOIZE, MARK, ref rest @ ..] => rest,
            [
                EMPTY_TUPLE,
                NEWOBJ,
                LONG_BINPUT,
                a,
                b,
                c,
                d,
                EMPTY_DICT,
                LONG_BINPUT,
                e,
                f,
                g,
                h,
                MARK,
                ref rest @ ..,
            ] if self.are_next([[a, b, c, d], [e, f, g, h]]) => rest,
            _ => {
                self.expect(EMPTY_TUPLE)?;
                self.expect(NEWOBJ)?;
                self.put()?;
                self.expect(EMPTY_DICT)?;
                self.put()?;
                return self.expect(MARK);
            }
        };
        self.count(2)
    }

    /// Fetches a value from the memo, where the next opcode does.
    #[inline]
    fn fetch(&mut self, memo: &Memo) -> Option<NodeId> {
        let (index, rest) = match *self.rest {
            [op::LONG_BINGET, a, b, c, d, ref rest @ ..] => {
                (u32::from_le_bytes([a, b, c, d]), rest)
            }
            [op::BINGET, index, ref rest @ ..] => (index.into(), rest),
            _ => return None,
        };
        self.rest = rest;
        memo.get(index as usize)
    }

    /// The next name and value, or the end of the record.
    #[inline]
    fn field(
        &mut self,
        memo: &Memo,
        pickle: &Pickle<'a>,
        each_str: impl FnMut(usize, &'a str),
    ) -> Option<Option<(NodeId, Field<'a>)>> {
        if let [op::SETITEMS, op::BUILD, rest @ ..] = self.rest {
            self.rest = rest;
            return Some(None);
        }
        let name = self.fetch(memo)?;
        Some(Some((name, self.value(memo, pickle, each_str)?)))
    }

    #[inline]
    fn value(
        &mut self,
        memo: &Memo,
        pickle: &Pickle<'a>,
        each_str: impl FnMut(usize, &'a str),
    ) -> Option<Field<'a>> {
        if let Some((number, rest)) = integer(self.rest) {
            self.rest = rest;
            return Some(Field::Int(number));
        }
        let (len, rest) = match *self.rest {
            [op::BINGET | op::LONG_BINGET, ..] => {
                let id = self.fetch(memo)?;
                return match *pickle.node(id) {
                    Node::Str(_) | Node::Int(_) => Some(Field::Node(id)),
                    Node::Global(class) if pickle.size_class == Some(class) => {
                        self.size().map(Field::Size)
                    }
                    _ => None,
                };
            }
            [op::NONE, ref rest @ ..] => {
                self.rest = rest;
                return Some(Field::None);
            }
            [op::SHORT_BINUNICODE, len, ref rest @ ..] => (usize::from(len), rest),
            [op::BINUNICODE, a, b, c, d, ref rest @ ..] => {
                (usize::try_from(u32::from_le_bytes([a, b, c, d])).ok()?, rest)
            }
            _ => return None,
        };
        self.text(len, rest, each_str).map(Field::Str)
    }

    /// A string of `len` bytes at the start of `rest`.
    fn text(
        &mut self,
        len: usize,
        rest: &'a [u8],
        mut each_str: impl FnMut(usize, &'a str),
    ) -> Option<&'a str> {
        let (text, rest) = rest.split_at_checked(len)?;
        let text = str::from_utf8(text).ok()?;
        self.rest = rest;
        let number = self.memo as usize;
        if self.put()? {
            each_str(number, text);
        }
        Some(text)
    }

    /// The call of `torch.Size` with a tuple of numbers.
    #[inline]
    fn size(&mut self) -> Option<Sizes<'a>> {
        let marked = self.rest.first() == Some(&op::MARK);
        if marked {
            self.expect(op::MARK)?;
        }
        let from = self.rest;
        let mut len = 0;
        while let Some((number, rest)) = integer(self.rest) {
            self.rest = rest;
            len += 1;
            if number < 0 || len > Dims::MAX_AXES {
                return None;
            }
        }
        let encoded = from.get(..from.len() - self.rest.len())?;
        let tuple = match (marked, len) {
            (true, _) => op::TUPLE,
            (false, 0) => op::EMPTY_TUPLE,
            (false, 1) => op::TUPLE1,
            (false, 2) => op::TUPLE2,
            (false, 3) => op::TUPLE3,
            (false, _) => return None,
        };
        self.expect(tuple)?;
        self.called()?;
        Some(Sizes { encoded, len })
    }

    /// The end of a call with one argument, which was just made.
    #[inline]
    fn called(&mut self) -> Option<()> {
        use op::{LONG_BINPUT, MEMOIZE, REDUCE, TUPLE1};
        self.rest = match *self.rest {
            [MEMOIZE, TUPLE1, MEMOIZE, REDUCE, MEMOIZE, ref rest @ ..] => rest,
            [
                LONG_BINPUT,
                a,
                b,
                c,
                d,
                TUPLE1,
                LONG_BINPUT,
                e,
                f,
                g,
                h,
                REDUCE,
                LONG_BINPUT,
                i,
                j,
                k,
                l,
                ref rest @ ..,
            ] if self.are_next([[a, b, c, d], [e, f, g, h], [i, j, k, l]]) => rest,
            _ => {
                self.put()?;
                self.expect(TUPLE1)?;
                self.put()?;
                self.expect(REDUCE)?;
                return self.put().map(drop);
            }
        };
        self.count(3)
    }
}
