//! Rectangles of box-drawing characters that may share borders.

/// A grid of characters. Rows count down, columns to the right.
#[derive(Debug)]
pub(crate) struct Canvas {
    width: usize,
    /// Per cell, the directions in which a line leaves it.
    lines: Vec<u8>,
    /// Per cell, a character that is no line, and its color.
    marks: Vec<Option<(char, Option<usize>)>>,
}

const UP: u8 = 1;
const DOWN: u8 = 2;
const LEFT: u8 = 4;
const RIGHT: u8 = 8;

impl Canvas {
    pub(crate) fn new(width: usize, height: usize) -> Self {
        let cells = width * height;
        Self { width, lines: vec![0; cells], marks: vec![None; cells] }
    }

    fn line(&mut self, row: usize, column: usize, directions: u8) {
        if column < self.width
            && let Some(cell) = self.lines.get_mut(row * self.width + column)
        {
            *cell |= directions;
        }
    }

    /// Draws a frame through the given rows and columns.
    pub(crate) fn frame(&mut self, top: usize, left: usize, bottom: usize, right: usize) {
        for column in left..right {
            for row in [top, bottom] {
                self.line(row, column, RIGHT);
                self.line(row, column + 1, LEFT);
            }
        }
        for row in top..bottom {
            for column in [left, right] {
                self.line(row, column, DOWN);
                self.line(row + 1, column, UP);
            }
        }
    }

    /// Writes text over whatever is there, in a color of its own.
    pub(crate) fn text(&mut self, row: usize, column: usize, text: &str, hue: Option<usize>) {
        for (at, c) in text.chars().enumerate() {
            if column + at < self.width
                && let Some(cell) = self.marks.get_mut(row * self.width + column + at)
            {
                *cell = Some((c, hue));
            }
        }
    }

    /// The rows, with marks colored by `paint`.
    pub(crate) fn rows(&self, paint: impl Fn(usize, &str) -> String) -> Vec<String> {
        let rows = self.lines.chunks(self.width.max(1)).zip(self.marks.chunks(self.width.max(1)));
        rows.map(|(lines, marks)| {
            let mut text = String::new();
            for (line, mark) in lines.iter().zip(marks) {
                match mark {
                    Some((c, Some(hue))) => text.push_str(&paint(*hue, &c.to_string())),
                    Some((c, None)) => text.push(*c),
                    None => text.push(glyph(*line)),
                }
            }
            text.trim_end().to_owned()
        })
        .collect()
    }
}

fn glyph(directions: u8) -> char {
    match directions {
        0 => ' ',
        d if d & (UP | DOWN) == 0 => '─',
        d if d & (LEFT | RIGHT) == 0 => '│',
        d if d == DOWN | RIGHT => '┌',
        d if d == DOWN | LEFT => '┐',
        d if d == UP | RIGHT => '└',
        d if d == UP | LEFT => '┘',
        d if d & LEFT == 0 => '├',
        d if d & RIGHT == 0 => '┤',
        d if d & UP == 0 => '┬',
        d if d & DOWN == 0 => '┴',
        _ => '┼',
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbors_share_a_border() {
        let mut canvas = Canvas::new(9, 5);
        canvas.frame(0, 0, 4, 4);
        canvas.frame(0, 4, 2, 8);
        canvas.frame(2, 4, 4, 8);
        canvas.text(1, 2, "A", None);
        let rows = canvas.rows(|_, text| text.to_owned());
        assert_eq!(rows, ["┌───┬───┐", "│ A │   │", "│   ├───┤", "│   │   │", "└───┴───┘"]);
    }
}
