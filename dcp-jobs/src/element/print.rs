//! Prints tensors as PyTorch does (rules of 2.15: four digits, three items at each edge).

use dcp_core::{DType, Dims, Region};

use crate::element::{Element, decode};
use crate::error::JobError;

/// Items printed at each end of an axis of a summarized tensor.
const EDGE: u64 = 3;
/// Number of elements from which a tensor is summarized.
const THRESHOLD: u64 = 1000;
/// Line width in columns.
const WIDTH: usize = 80;
/// The text before the numbers.
const PREFIX: &str = "tensor(";
/// The maximum number of boxes that a summary reads.
const MAX_BOXES: usize = 4096;

/// The boxes of a tensor that its printed form shows: all of it, or its edges.
#[derive(Clone, Debug)]
pub(crate) struct Excerpt {
    shape: Dims,
    /// The printed ranges of each axis: one, or two with `...` between.
    axes: Vec<Vec<(u64, u64)>>,
}

impl Excerpt {
    pub(crate) fn of(shape: &Dims) -> Result<Self, JobError> {
        let too_many = || JobError::TooLarge {
            what: format!("a tensor of {} axes", shape.ndim()),
            limit: "can be printed".to_owned(),
            instead: "write it to a file",
        };
        if shape.ndim() > Dims::MAX_AXES {
            return Err(too_many());
        }
        let summarized = shape.checked_volume().is_none_or(|volume| volume > THRESHOLD);
        let axes: Vec<_> = shape
            .iter()
            .map(|&len| {
                if summarized && len > 2 * EDGE {
                    vec![(0, EDGE), (len - EDGE, EDGE)]
                } else {
                    vec![(0, len)]
                }
            })
            .collect();
        let boxes = axes.iter().try_fold(1_usize, |n, ranges| n.checked_mul(ranges.len()));
        if boxes.is_none_or(|boxes| boxes > MAX_BOXES) {
            return Err(too_many());
        }
        Ok(Self { shape: shape.clone(), axes })
    }

    /// The boxes to read, in row-major order.
    pub(crate) fn boxes(&self) -> Vec<Region> {
        let mut corners = vec![(Vec::new(), Vec::new())];
        for ranges in &self.axes {
            corners = corners
                .into_iter()
                .flat_map(|(offsets, sizes)| {
                    ranges.iter().map(move |(offset, size)| {
                        let mut corner: (Vec<u64>, Vec<u64>) = (offsets.clone(), sizes.clone());
                        corner.0.push(*offset);
                        corner.1.push(*size);
                        corner
                    })
                })
                .collect();
        }
        corners.into_iter().filter_map(|(o, s)| Region::new(o, s).ok()).collect()
    }

    /// Formats the tensor from the bytes of its [`boxes`](Self::boxes), concatenated.
    pub(crate) fn print(&self, dtype: DType, bytes: &[u8]) -> String {
        let shown: Vec<u64> =
            self.axes.iter().map(|ranges| ranges.iter().map(|(_, len)| len).sum()).collect();
        let elements = self.gather(dtype, bytes, &shown);
        let mut out = String::from(PREFIX);
        let mut suffixes = Vec::new();
        if self.shape.contains(&0) {
            out.push_str("[]");
            if self.shape.ndim() != 1 {
                let sizes: Vec<_> = self.shape.iter().map(ToString::to_string).collect();
                suffixes.push(format!("size=({})", sizes.join(", ")));
            }
        } else {
            let text = Formatter::new(&elements);
            self.write(&mut out, 0, PREFIX.len(), &text, &elements);
        }
        if !is_default(dtype) {
            suffixes.push(format!("dtype=torch.{dtype}"));
        }
        // PyTorch reserves two columns on the last line for the next separator.
        let mut column = out.len() - out.rfind('\n').map_or(0, |at| at + 1) + 2;
        for suffix in suffixes {
            if column + suffix.len() + 2 > WIDTH {
                out.push_str(&format!(",\n{:1$}{suffix}", "", PREFIX.len()));
                column = PREFIX.len() + suffix.len();
            } else {
                out.push_str(&format!(", {suffix}"));
                column += suffix.len() + 2;
            }
        }
        out.push(')');
        out
    }

    /// Reorders the elements from the order of boxes to row-major order.
    fn gather(&self, dtype: DType, bytes: &[u8], shown: &[u64]) -> Vec<Element> {
        let count = shown.iter().product::<u64>();
        let mut elements = vec![Element::Bits(0, 8); usize::try_from(count).unwrap_or(0)];
        let mut next = bytes.chunks_exact(dtype.size());
        for region in self.boxes() {
            // The offsets of the box in the printed part.
            let offsets: Dims = region
                .offsets()
                .iter()
                .zip(&self.axes)
                .map(
                    |(offset, ranges)| {
                        if *offset == 0 { 0 } else { ranges.first().map_or(0, |r| r.1) }
                    },
                )
                .collect();
            let Ok(place) = Region::new(offsets, region.sizes().clone()) else { continue };
            for (start, len) in place.runs_in(shown) {
                for at in start..start + len {
                    let slot = usize::try_from(at).ok().and_then(|at| elements.get_mut(at));
                    if let (Some(slot), Some(bytes)) = (slot, next.next()) {
                        *slot = decode(dtype, bytes).unwrap_or(*slot);
                    }
                }
            }
        }
        elements
    }

    fn write(
        &self,
        out: &mut String,
        axis: usize,
        indent: usize,
        text: &Formatter,
        elements: &[Element],
    ) {
        let Some(ranges) = self.axes.get(axis) else {
            out.push_str(&elements.first().map_or_else(String::new, |e| text.format(e)));
            return;
        };
        let count: u64 = ranges.iter().map(|(_, len)| len).sum();
        let each = elements.len() / usize::try_from(count).unwrap_or(1).max(1);
        let items = elements.chunks(each.max(1));
        let gap = if ranges.len() == 2 { EDGE as usize } else { usize::MAX };
        let left = self.axes.len() - axis;
        out.push('[');
        if left == 1 {
            let per_line = ((WIDTH.saturating_sub(indent)) / (text.width() + 2)).max(1);
            let mut words: Vec<String> =
                items.flat_map(|item| item.first()).map(|e| text.format(e)).collect();
            if gap < words.len() {
                words.insert(gap, " ...".to_owned());
            }
            let lines: Vec<_> = words.chunks(per_line).map(|line| line.join(", ")).collect();
            out.push_str(&lines.join(&format!(",\n{:1$}", "", indent + 1)));
        } else {
            let separator = format!(",{}{:2$}", "\n".repeat(left - 1), "", indent + 1);
            for (index, item) in items.enumerate() {
                if index > 0 {
                    out.push_str(&separator);
                }
                if index == gap {
                    out.push_str("...");
                    out.push_str(&separator);
                }
                self.write(out, axis + 1, indent + 1, text, item);
            }
        }
        out.push(']');
    }
}

/// Whether PyTorch omits the dtype, because a literal of these values has it by default.
fn is_default(dtype: DType) -> bool {
    matches!(dtype, DType::Float32 | DType::Int64 | DType::Bool | DType::Complex64)
}

/// The format that all numbers of one tensor share.
#[derive(Debug)]
struct Formatter {
    real: Style,
    /// The format of the imaginary parts of complex numbers.
    imaginary: Option<Style>,
}

#[derive(Clone, Copy, Debug)]
struct Style {
    kind: StyleKind,
    width: usize,
}

#[derive(Clone, Copy, Debug)]
enum StyleKind {
    /// Integers and booleans.
    Plain,
    /// Floats that are all whole: `3.`.
    Whole,
    /// `0.1235`.
    Fixed,
    /// `1.2346e-05`.
    Scientific,
}

impl Formatter {
    fn new(elements: &[Element]) -> Self {
        match elements.first() {
            Some(Element::Float(_)) => {
                let all: Vec<f64> = elements.iter().map(|e| parts(e).0).collect();
                Self { real: Style::of_floats(&all), imaginary: None }
            }
            Some(Element::Complex(..)) => {
                let (real, imaginary): (Vec<f64>, Vec<f64>) = elements.iter().map(parts).unzip();
                Self {
                    real: Style::of_floats(&real),
                    imaginary: Some(Style::of_floats(&imaginary)),
                }
            }
            _ => {
                let width = elements.iter().map(|e| e.to_string().len()).max().unwrap_or(1);
                Self { real: Style { kind: StyleKind::Plain, width }, imaginary: None }
            }
        }
    }

    fn width(&self) -> usize {
        self.real.width + self.imaginary.map_or(0, |style| style.width + 1)
    }

    fn format(&self, element: &Element) -> String {
        match (element, self.imaginary) {
            (Element::Float(x), _) => self.real.format(*x),
            (Element::Complex(re, im), Some(style)) => {
                let imaginary = style.format(*im);
                let imaginary = imaginary.trim_start();
                let plus = if imaginary.starts_with('-') { "" } else { "+" };
                format!("{}{plus}{imaginary}j", self.real.format(*re))
            }
            (other, _) => format!("{:>1$}", other.to_string(), self.real.width),
        }
    }
}

fn parts(element: &Element) -> (f64, f64) {
    match element {
        Element::Float(x) => (*x, 0.0),
        Element::Complex(re, im) => (*re, *im),
        _ => (f64::NAN, f64::NAN),
    }
}

impl Style {
    fn of_floats(all: &[f64]) -> Self {
        let telling = || all.iter().copied().filter(|x| x.is_finite() && *x != 0.0);
        let (mut min, mut max, mut whole) = (f64::INFINITY, 0.0_f64, true);
        for x in telling() {
            min = min.min(x.abs());
            max = max.max(x.abs());
            whole &= x == x.ceil();
        }
        if max == 0.0 {
            return Self { kind: StyleKind::Whole, width: 1 };
        }
        let wide = max / min > 1000.0 || max > 1e8;
        let kind = match whole {
            _ if wide || (!whole && min < 1e-4) => StyleKind::Scientific,
            true => StyleKind::Whole,
            false => StyleKind::Fixed,
        };
        let style = Self { kind, width: 1 };
        let width = telling().map(|x| style.format(x).len()).max().unwrap_or(1);
        Self { kind, width }
    }

    fn format(self, x: f64) -> String {
        let text = if x.is_nan() {
            "nan".to_owned()
        } else if x.is_infinite() {
            if x > 0.0 { "inf" } else { "-inf" }.to_owned()
        } else {
            match self.kind {
                StyleKind::Plain => x.to_string(),
                StyleKind::Whole => format!("{x:.0}."),
                StyleKind::Fixed => format!("{x:.4}"),
                StyleKind::Scientific => scientific(x),
            }
        };
        format!("{text:>0$}", self.width)
    }
}

fn scientific(x: f64) -> String {
    let text = format!("{x:.4e}");
    let Some((digits, power)) = text.split_once('e') else { return text };
    let (sign, power) = power.strip_prefix('-').map_or(('+', power), |power| ('-', power));
    format!("{digits}e{sign}{power:0>2}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn print(shape: &[u64], elements: impl IntoIterator<Item = f32>) -> String {
        let whole: Vec<u8> = elements.into_iter().flat_map(f32::to_le_bytes).collect();
        let excerpt = Excerpt::of(&shape.into()).unwrap();
        let mut bytes = Vec::new();
        for region in excerpt.boxes() {
            for (at, len) in region.runs_in(shape) {
                bytes.extend_from_slice(&whole[at as usize * 4..(at + len) as usize * 4]);
            }
        }
        excerpt.print(DType::Float32, &bytes)
    }

    // The expected texts are what torch 2.15 prints.

    #[test]
    fn small_tensors() {
        assert_eq!(print(&[], [0.5]), "tensor(0.5000)");
        assert_eq!(print(&[3], [1.0, 2.0, 3.0]), "tensor([1., 2., 3.])");
        assert_eq!(print(&[2], [0.0, f32::NAN]), "tensor([0., nan])");
        assert_eq!(print(&[2], [-0.25, 10.5]), "tensor([-0.2500, 10.5000])");
        assert_eq!(print(&[2], [1e-5, 1.0]), "tensor([1.0000e-05, 1.0000e+00])");
        assert_eq!(print(&[0], []), "tensor([])");
        assert_eq!(print(&[0, 5], []), "tensor([], size=(0, 5))");
        assert_eq!(
            print(&[2, 2], [1.0, 2.0, -3.0, 4.0]),
            "tensor([[ 1.,  2.],\n        [-3.,  4.]])"
        );
    }

    #[test]
    fn large_tensors_show_their_edges() {
        let text = print(&[100, 20], (0..2000_u16).map(f32::from));
        assert_eq!(
            text,
            "tensor([[0.0000e+00, 1.0000e+00, 2.0000e+00,  ..., 1.7000e+01, 1.8000e+01,\n         \
             1.9000e+01],\n        \
             [2.0000e+01, 2.1000e+01, 2.2000e+01,  ..., 3.7000e+01, 3.8000e+01,\n         \
             3.9000e+01],\n        \
             [4.0000e+01, 4.1000e+01, 4.2000e+01,  ..., 5.7000e+01, 5.8000e+01,\n         \
             5.9000e+01],\n        \
             ...,\n        \
             [1.9400e+03, 1.9410e+03, 1.9420e+03,  ..., 1.9570e+03, 1.9580e+03,\n         \
             1.9590e+03],\n        \
             [1.9600e+03, 1.9610e+03, 1.9620e+03,  ..., 1.9770e+03, 1.9780e+03,\n         \
             1.9790e+03],\n        \
             [1.9800e+03, 1.9810e+03, 1.9820e+03,  ..., 1.9970e+03, 1.9980e+03,\n         \
             1.9990e+03]])"
        );
    }

    #[test]
    fn other_types_say_so() {
        let print = |dtype, bytes: &[u8]| {
            let shape = Dims::from([bytes.len() as u64 / DType::size(dtype) as u64]);
            Excerpt::of(&shape).unwrap().print(dtype, bytes)
        };
        assert_eq!(print(DType::UInt8, &[1, 20]), "tensor([ 1, 20], dtype=torch.uint8)");
        let wide = vec![0x80; 12];
        assert!(print(DType::Int8, &wide).ends_with("-128],\n       dtype=torch.int8)"));
        assert_eq!(print(DType::Bool, &[1, 0]), "tensor([ True, False])");
        let complex: Vec<u8> =
            [1_f32, -2.0, 0.5, 3.0].into_iter().flat_map(f32::to_le_bytes).collect();
        assert_eq!(print(DType::Complex64, &complex), "tensor([1.0000-2.j, 0.5000+3.j])");
    }

    #[test]
    fn too_many_axes_are_refused() {
        assert!(Excerpt::of(&Dims::from(vec![7; 20])).is_err());
        assert!(Excerpt::of(&Dims::from(vec![1; Dims::MAX_AXES])).is_ok());
        assert!(Excerpt::of(&Dims::from(vec![1; Dims::MAX_AXES + 1])).is_err());
    }
}
