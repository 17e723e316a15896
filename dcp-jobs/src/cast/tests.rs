//! Every value of the narrow dtypes and many of the wide ones, against exact arithmetic and
//! against PyTorch.

use std::path::Path;

use dcp_formats::safetensors::{Header, PREFIX_LEN, header_len};
use proptest::prelude::*;

use dcp_core::DType;

use crate::element::{Element, decode};

use super::*;

const NARROW: [DType; 7] = [
    DType::Float16,
    DType::BFloat16,
    DType::Float8E4M3Fn,
    DType::Float8E5M2,
    DType::Float8E4M3FnUz,
    DType::Float8E5M2FnUz,
    DType::Float8E8M0Fnu,
];

fn cast(from: DType, to: DType, source: &[u8]) -> (Vec<u8>, CastCounts) {
    let options = CastOptions::default().with_truncate(true);
    let caster = Caster::new("w", from, to, options).unwrap();
    let mut target = vec![0; source.len() / from.size() * to.size()];
    let mut counts = CastCounts::default();
    caster.cast(source, &mut target, &mut counts);
    (target, counts)
}

fn float(dtype: DType, bytes: &[u8]) -> f64 {
    match decode(dtype, bytes) {
        Some(Element::Float(x)) => x,
        other => panic!("{dtype}: {other:?}"),
    }
}

/// All values of a narrow dtype that are not negative, ascending, with their codes.
fn values(dtype: DType) -> Vec<(f64, u16)> {
    let codes = 0..1_u32 << (8 * dtype.size());
    let mut values: Vec<_> = codes
        .map(|code| (float(dtype, &code.to_le_bytes()[..dtype.size()]), code as u16))
        .filter(|(value, _)| value.is_finite() && !value.is_sign_negative())
        .collect();
    values.sort_by(|a, b| a.0.total_cmp(&b.0));
    values
}

/// The nearest value as the rules have it, found by looking at all of them.
struct Reference {
    dtype: DType,
    values: Vec<(f64, u16)>,
}

impl Reference {
    fn new(dtype: DType) -> Self {
        Self { dtype, values: values(dtype) }
    }

    fn nearest(&self, x: f64) -> f64 {
        let magnitude = x.abs();
        let (largest, code) = *self.values.last().unwrap();
        if x.is_nan() {
            return f64::NAN;
        }
        if self.dtype == DType::Float8E8M0Fnu {
            if magnitude >= 1.5 * 2_f64.powi(127) {
                return f64::NAN;
            }
            if magnitude <= 2_f64.powi(-127) {
                return 2_f64.powi(-127);
            }
            let above = self.values.iter().position(|(value, _)| *value >= magnitude);
            let Some(above) = above else { return largest };
            let (low, high) = (self.values[above - 1].0, self.values[above].0);
            // Between the two smallest, PyTorch rounds up whatever is nearer.
            let up = above == 1 || magnitude >= 1.5 * low;
            return if up { high } else { low };
        }
        let sign = |value: f64| if x.is_sign_negative() { -value } else { value };
        let step = largest - self.values[self.values.len() - 2].0;
        let tie = largest + step / 2.0;
        if magnitude > tie || (magnitude == tie && code & 1 == 1) {
            return match self.dtype {
                DType::Float16 | DType::BFloat16 | DType::Float8E5M2 => sign(f64::INFINITY),
                DType::Float8E4M3Fn => sign(largest),
                _ => f64::NAN,
            };
        }
        let at = self.values.partition_point(|(value, _)| *value <= magnitude);
        let (low, code) = self.values[at - 1];
        let high = self.values.get(at).map_or(low, |(value, _)| *value);
        // Both have few enough bits for their middle to be exact.
        let middle = low + (high - low) / 2.0;
        let up = magnitude > middle || (magnitude == middle && code & 1 == 1);
        sign(if up { high } else { low })
    }

    #[track_caller]
    fn check(&self, from: DType, source: &[u8]) {
        let (target, counts) = cast(from, self.dtype, source);
        let (mut under, mut nan, mut inexact) = (0, 0, 0);
        for (old, new) in source.chunks(from.size()).zip(target.chunks(self.dtype.size())) {
            let (x, found) = (float(from, old), float(self.dtype, new));
            let expected = self.nearest(x);
            let same = found == expected || (found.is_nan() && expected.is_nan());
            assert!(same, "{from} {x:e} as {}: {found:e}, not {expected:e}", self.dtype);
            // Only the `fnuz` dtypes have no negative zero, and E8M0 no sign at all.
            let signed = !matches!(
                self.dtype,
                DType::Float8E4M3FnUz | DType::Float8E5M2FnUz | DType::Float8E8M0Fnu
            );
            if signed && !x.is_nan() {
                assert_eq!(found.is_sign_negative(), x.is_sign_negative(), "{x:e}");
            }
            under += u64::from(x != 0.0 && found == 0.0);
            nan += u64::from(!x.is_nan() && found.is_nan());
            inexact += u64::from(!x.is_nan() && found != x);
        }
        let found = (counts.underflowed, counts.became_nan, counts.inexact);
        assert_eq!(found, (under, nan, inexact), "{from} as {}", self.dtype);
        assert_eq!(counts.elements, (source.len() / from.size()) as u64);
    }
}

/// Every element of a narrow dtype.
fn all_codes(dtype: DType) -> Vec<u8> {
    let codes = 0..1_u32 << (8 * dtype.size());
    codes.flat_map(|code| code.to_le_bytes().into_iter().take(dtype.size())).collect()
}

#[test]
fn every_narrow_value_becomes_the_nearest_of_every_narrow_dtype() {
    for to in NARROW {
        let reference = Reference::new(to);
        for from in NARROW.into_iter().filter(|from| *from != to) {
            reference.check(from, &all_codes(from));
        }
    }
}

#[test]
fn what_is_not_compared_is_exact() {
    for from in NARROW {
        for to in NARROW.into_iter().filter(|to| dcp_cast::holds(*to, from)) {
            let codes = all_codes(from);
            for (old, new) in
                codes.chunks(from.size()).zip(cast(from, to, &codes).0.chunks(to.size()))
            {
                let (old, new) = (float(from, old), float(to, new));
                assert!(old.to_bits() == new.to_bits() || old.is_nan() && new.is_nan());
            }
        }
    }
}

#[test]
fn every_narrow_value_is_exact_in_wider_dtypes_and_comes_back() {
    for narrow in NARROW {
        let codes = all_codes(narrow);
        for wide in [DType::Float32, DType::Float64] {
            let (widened, counts) = cast(narrow, wide, &codes);
            let changed = (counts.inexact, counts.out_of_range, counts.max_relative_error);
            assert_eq!(changed, (0, 0, 0.0));
            for (code, wide_bytes) in codes.chunks(narrow.size()).zip(widened.chunks(wide.size())) {
                let (old, new) = (float(narrow, code), float(wide, wide_bytes));
                assert!(old.to_bits() == new.to_bits() || (old.is_nan() && new.is_nan()));
            }
            let (back, counts) = cast(wide, narrow, &widened);
            assert_eq!(counts.inexact, 0);
            let is_nan = |code: &[u8]| float(narrow, code).is_nan();
            for (old, new) in codes.chunks(narrow.size()).zip(back.chunks(narrow.size())) {
                assert!(old == new || (is_nan(old) && is_nan(new)), "{narrow} {old:x?} {new:x?}");
            }
        }
    }
}

/// All values of the dtype, the middles between them, and both of their neighbors, of both signs.
fn boundaries(dtype: DType) -> Vec<f64> {
    let values: Vec<f64> = values(dtype).into_iter().map(|(value, _)| value).collect();
    let last = values[values.len() - 1] - values[values.len() - 2];
    let middles = values.windows(2).map(|pair| pair[0] + (pair[1] - pair[0]) / 2.0);
    let beyond = [values[values.len() - 1] + last / 2.0, values[values.len() - 1] + last];
    let all: Vec<f64> = values.iter().copied().chain(middles).chain(beyond).collect();
    let ends = [0.0, f64::MIN_POSITIVE, f64::MAX, f64::INFINITY, f64::NAN, 5e-324];
    all.iter().chain(&ends).flat_map(|x| [*x, -*x]).collect()
}

#[test]
fn ties_and_their_neighbors_are_rounded_right_from_wider_floats() {
    for to in NARROW {
        let reference = Reference::new(to);
        let points = boundaries(to);
        let doubles: Vec<u8> = points
            .iter()
            .flat_map(|x| [x.next_down(), *x, x.next_up()])
            .flat_map(f64::to_le_bytes)
            .collect();
        reference.check(DType::Float64, &doubles);
        let singles: Vec<u8> = points
            .iter()
            .map(|x| *x as f32)
            .flat_map(|x| [x.next_down(), x, x.next_up()])
            .flat_map(f32::to_le_bytes)
            .collect();
        reference.check(DType::Float32, &singles);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn any_float_is_rounded_right(bits in prop::collection::vec(any::<u64>(), 50)) {
        let doubles: Vec<u8> = bits.iter().flat_map(|bits| bits.to_le_bytes()).collect();
        let near: Vec<u8> = bits
            .iter()
            .map(|bits| f64::from_bits(bits & !(0x7ff << 52) | (870 + bits % 300) << 52))
            .flat_map(f64::to_le_bytes)
            .collect();
        let singles: Vec<u8> = bits.iter().flat_map(|bits| (*bits as u32).to_le_bytes()).collect();
        for to in NARROW {
            let reference = Reference::new(to);
            reference.check(DType::Float64, &doubles);
            reference.check(DType::Float64, &near);
            reference.check(DType::Float32, &singles);
        }
        let (found, _) = cast(DType::Float64, DType::Float32, &near);
        for (old, new) in near.chunks(8).zip(found.chunks(4)) {
            let old = f64::from_le_bytes(old.try_into().unwrap());
            prop_assert_eq!((old as f32).to_le_bytes(), new);
        }
    }

    #[test]
    fn any_integer_is_rounded_once(bits in prop::collection::vec((any::<u64>(), 0_u32..64), 50)) {
        let numbers: Vec<u64> = bits.iter().map(|(bits, shift)| bits >> shift).collect();
        let unsigned: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
        for to in [DType::Float32, DType::Float64] {
            for from in [DType::Int64, DType::UInt64] {
                let (found, _) = cast(from, to, &unsigned);
                for (n, new) in numbers.iter().zip(found.chunks(to.size())) {
                    let expected = match (from, to) {
                        (DType::Int64, DType::Float32) => f64::from(*n as i64 as f32),
                        (DType::Int64, _) => *n as i64 as f64,
                        (_, DType::Float32) => f64::from(*n as f32),
                        _ => *n as f64,
                    };
                    prop_assert_eq!(float(to, new), expected);
                }
            }
        }
        for to in NARROW.into_iter().filter(|to| *to != DType::Float8E8M0Fnu) {
            let values = Reference::new(to);
            let (found, counts) = cast(DType::UInt64, to, &unsigned);
            let mut inexact = 0;
            for (n, new) in numbers.iter().zip(found.chunks(to.size())) {
                // Cut off to fewer bits than a `f64` has, with the rest in the last of them, a
                // number has the same neighbors and is on the same side of their middle.
                let shift = (64 - n.leading_zeros()).saturating_sub(40);
                let sticky = u64::from(n & ((1 << shift) - 1) != 0);
                let cut = ((n >> shift << shift) as f64) + (sticky << shift.saturating_sub(1)) as f64;
                let (found, expected) = (float(to, new), values.nearest(cut));
                prop_assert!(found == expected || found.is_nan() && expected.is_nan(), "{} {}", n, to);
                inexact += u64::from(found as i128 != i128::from(*n) || found.is_nan());
            }
            prop_assert_eq!(counts.inexact, inexact);
        }
    }
}

/// Blocks and what is left of the last one are cast alike.
#[test]
fn any_number_of_elements_is_cast() {
    for n in [0, 1, 1023, 1024, 1025, 5000] {
        let numbers: Vec<f32> = (0..n).map(|i| i as f32 / 3.0).collect();
        let source: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
        let (doubles, counts) = cast(DType::Float32, DType::Float64, &source);
        assert_eq!(counts, CastCounts { elements: n, ..CastCounts::default() });
        let (singles, _) = cast(DType::Float64, DType::Float32, &doubles);
        assert_eq!(singles, source);
        let (bytes, _) = cast(DType::Float64, DType::Float8E5M2, &doubles);
        assert_eq!(bytes, cast(DType::Float32, DType::Float8E5M2, &source).0);
    }
}

#[test]
fn what_is_lost_is_counted() {
    let numbers = [1.0_f32, 1e6, -1e6, 1e-9, 0.0, f32::NAN, f32::INFINITY, 1.0 + 1.0 / 4096.0];
    let source: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
    let counts = cast(DType::Float32, DType::Float16, &source).1;
    let expected = CastCounts {
        elements: 8,
        out_of_range: 2,
        underflowed: 1,
        became_nan: 0,
        inexact: 4,
        max_relative_error: counts.max_relative_error,
    };
    assert_eq!(counts, expected);
    let error = 1.0 / 4097.0;
    assert!((counts.max_relative_error - error).abs() < 1e-9, "{counts:?}");
    let counts = cast(DType::Float32, DType::Float8E4M3Fn, &source).1;
    assert_eq!((counts.out_of_range, counts.became_nan), (3, 0), "infinity is not a value there");
    let counts = cast(DType::Float32, DType::Float8E4M3FnUz, &source).1;
    assert_eq!((counts.out_of_range, counts.became_nan), (3, 3));
    let counts = cast(DType::Float32, DType::Float8E8M0Fnu, &source).1;
    assert_eq!(counts.out_of_range, 3, "a negative number, zero and infinity");
    let ints: Vec<u8> = [300_i32, -1, 7, 0].iter().flat_map(|x| x.to_le_bytes()).collect();
    let (wrapped, counts) = cast(DType::Int32, DType::UInt8, &ints);
    assert_eq!((wrapped, counts.out_of_range, counts.inexact), (vec![44, 255, 7, 0], 2, 2));
    let floats: Vec<u8> = [1.9_f32, -1.9, 300.0, f32::NAN, 0.5, f32::NEG_INFINITY]
        .iter()
        .flat_map(|x| x.to_le_bytes())
        .collect();
    let (whole, counts) = cast(DType::Float32, DType::Int8, &floats);
    assert_eq!(whole, [1, 255, 127, 0, 0, 128]);
    assert_eq!((counts.out_of_range, counts.underflowed, counts.inexact), (3, 1, 6));
    let (truth, _) = cast(DType::Float32, DType::Bool, &floats);
    assert_eq!(truth, [1; 6]);
    assert!(counts.lost_range());
}

#[test]
fn complex_numbers_are_cast_part_by_part() {
    let numbers: Vec<u8> =
        [1.5_f64, -2.5, 1e300, 0.0].iter().flat_map(|x| x.to_le_bytes()).collect();
    let (single, counts) = cast(DType::Complex128, DType::Complex64, &numbers);
    let expected = [1.5_f32, -2.5, f32::INFINITY, 0.0];
    assert_eq!(single, expected.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>());
    assert_eq!((counts.elements, counts.out_of_range), (2, 1));
    let (brain, _) = cast(DType::Complex64, DType::BComplex32, &single);
    assert_eq!(brain, [0xc0, 0x3f, 0x20, 0xc0, 0x80, 0x7f, 0, 0]);
}

#[test]
fn pairs_without_meaning_are_refused_by_name() {
    let refused = |from, to, options| {
        let error = Caster::new("layer.weight", from, to, options).unwrap_err().to_string();
        assert!(error.contains("\"layer.weight\""), "{error}");
        error
    };
    let (plain, truncate) = (CastOptions::default(), CastOptions::default().with_truncate(true));
    assert!(refused(DType::Float32, DType::Int8, plain).contains("truncation"));
    assert!(refused(DType::Int8, DType::Bool, plain).contains("truncation"));
    assert!(refused(DType::Complex64, DType::Float32, truncate).contains("complex"));
    assert!(refused(DType::Float32, DType::Complex64, truncate).contains("complex"));
    assert!(refused(DType::QInt8, DType::Float32, truncate).contains("plain numbers"));
    assert!(refused(DType::Float32, DType::Float4E2M1FnX2, truncate).contains("plain numbers"));
    for &dtype in DType::ALL {
        let same = Caster::new("w", dtype, dtype, plain).unwrap();
        let (bytes, mut copy) = (vec![3; 3 * dtype.size()], vec![0; 3 * dtype.size()]);
        same.cast(&bytes, &mut copy, &mut CastCounts::default());
        assert_eq!(bytes, copy);
    }
}

#[test]
fn nans_are_pytorchs_bit_for_bit() {
    let path = "../fixtures/pytorch/vectors/nans.txt";
    let text = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap();
    let mut wrong = Vec::new();
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    for line in lines.clone() {
        let [from, to, given, expected] = *line.split(' ').collect::<Vec<_>>() else { panic!() };
        let (from, to): (DType, DType) = (from.parse().unwrap(), to.parse().unwrap());
        let bits = u64::from_str_radix(given, 16).unwrap().to_le_bytes();
        // Alone, and among others, where the compiler may take another way.
        for count in [1, 1500] {
            let cast = cast(from, to, &bits[..from.size()].repeat(count)).0;
            for found in cast.chunks(to.size()) {
                let found: String = found.iter().rev().map(|byte| format!("{byte:02x}")).collect();
                if found != expected {
                    wrong.push(format!("{line}: {found}"));
                }
            }
        }
    }
    wrong.dedup();
    assert!(wrong.is_empty(), "{} of {}: {wrong:#?}", wrong.len(), lines.count());
}

struct Golden {
    header: Header,
    data: Vec<u8>,
}

impl Golden {
    fn open() -> Self {
        let path = "../fixtures/pytorch/vectors/casts.safetensors";
        let file = std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap();
        let start = PREFIX_LEN + header_len(&file[..8], file.len() as u64).unwrap();
        let (head, data) = file.split_at(start as usize);
        let header = Header::parse(&head[8..], data.len() as u64).unwrap();
        Self { header, data: data.to_vec() }
    }

    fn bytes(&self, name: &str) -> &[u8] {
        let found = self.header.tensors().find(|(known, _)| &***known == name);
        let (_, info) = found.unwrap_or_else(|| panic!("{name}"));
        &self.data[info.byte_range.start as usize..info.byte_range.end as usize]
    }

    /// Whether `found` is what PyTorch made of `input`; any NaN is as good as another.
    fn check(&self, input: &str, to: DType, found: &[u8]) {
        let name = format!("{input}.to.{to}");
        let size = to.size();
        let (expected, given) = (self.bytes(&name), self.bytes(input));
        assert_eq!(found.len(), expected.len(), "{name}");
        let is_nan = |bytes| matches!(decode(to, bytes), Some(Element::Float(x)) if x.is_nan());
        let step = given.len() / (expected.len() / size);
        for (at, (found, expected)) in found.chunks(size).zip(expected.chunks(size)).enumerate() {
            let same = found == expected || (is_nan(found) && is_nan(expected));
            let given = &given[at * step..][..step];
            assert!(same, "{name}: {given:x?} became {found:x?}, not {expected:x?}");
        }
    }
}

#[test]
fn casts_are_pytorchs_bit_for_bit() {
    let golden = Golden::open();
    for to in NARROW.into_iter().chain([DType::Float64]) {
        if to != DType::Float64 {
            golden.check("f32", to, &cast(DType::Float32, to, golden.bytes("f32")).0);
        }
        // PyTorch goes by way of `float32` from both, and rounds twice.
        let way = |from, name| match to {
            DType::Float64 => cast(from, to, golden.bytes(name)).0,
            _ => {
                let single = cast(from, DType::Float32, golden.bytes(name)).0;
                cast(DType::Float32, to, &single).0
            }
        };
        golden.check("i64", to, &way(DType::Int64, "i64"));
        if to != DType::Float64 {
            golden.check("f64", to, &way(DType::Float64, "f64"));
        }
    }
    golden.check(
        "f64",
        DType::Float32,
        &cast(DType::Float64, DType::Float32, golden.bytes("f64")).0,
    );
    golden.check("i64", DType::Float32, &cast(DType::Int64, DType::Float32, golden.bytes("i64")).0);
    for to in [DType::Int32, DType::Int16, DType::Int8, DType::UInt8] {
        golden.check("i64", to, &cast(DType::Int64, to, golden.bytes("i64")).0);
    }
    let small = golden.bytes("f32.small");
    for to in [DType::Int32, DType::Bool] {
        golden.check("f32.small", to, &cast(DType::Float32, to, small).0);
    }
}
