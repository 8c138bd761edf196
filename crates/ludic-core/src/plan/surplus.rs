//! Closes micro-batches without padding that the tokens do not need.
//!
//! Best fit decreasing now and then leaves a few free tokens in each micro-batch (bin) and needs
//! one bin more for what fits nowhere. That bin and another one are emptied into a pool, and so is
//! each further bin with free tokens in turn: the subset of the pool that fills it best goes back,
//! and the rest goes on, until it fits in one bin. Every bin thus takes up its free tokens, and the
//! rest is always as large as a bin, so that it has many subsets to choose from. Which sums a pool
//! can reach is a set of bits, shifted by the length of each sample (Bellman's recurrence for
//! subset sums).
//!
//! Lengths 5, 4, 4, 3, 2, 2 and a budget of 10: best fit makes [5, 4], [4, 3, 2] and [2]. The pool
//! of all of them fills a bin with 4, 4, 2, and the rest is 5, 3, 2, which fits in one.

use std::cmp::Reverse;

use super::ranges;

/// A micro-batch, and the rows that it gets.
type Refilled = (usize, Vec<u32>);

/// Words of 64 sums that a search may compute, for few samples and for many.
const LEAST_WORDS: usize = 1 << 20;
const MOST_WORDS: usize = 1 << 22;
/// How many bins are tried as the one that is emptied in addition to the emptiest.
const MOST_PARTNERS: usize = 8;

/// The indices and offsets of a plan with as many bins fewer as can be found, but no fewer than
/// `fewest`. The search is given up after a number of steps that depends on the number of samples
/// only. It never adds a bin, and a plan with `fewest` bins is returned as it is.
pub(super) fn close_surplus(
    lengths: &[i32],
    indices: Vec<u32>,
    offsets: Vec<u32>,
    budget: u64,
    fewest: usize,
) -> (Vec<u32>, Vec<u32>) {
    if offsets.len() - 1 <= fewest {
        return (indices, offsets);
    }
    let mut bins: Vec<Vec<u32>> = ranges(&offsets).map(|rows| indices[rows].to_vec()).collect();
    let words_left = LEAST_WORDS.saturating_add(16 * lengths.len()).min(MOST_WORDS);
    let mut search = Search { lengths, budget, words_left };
    while bins.len() > fewest && search.close_one(&mut bins) {}
    let mut ends = vec![0];
    ends.extend(bins.iter().scan(0, |end, bin| {
        *end += bin.len() as u32;
        Some(*end)
    }));
    (bins.concat(), ends)
}

struct Search<'a> {
    lengths: &'a [i32],
    budget: u64,
    words_left: usize,
}

impl Search<'_> {
    /// Empties the emptiest bin into the others and removes it. Returns false, and changes nothing,
    /// if its samples found no room.
    fn close_one(&mut self, bins: &mut Vec<Vec<u32>>) -> bool {
        let mut order: Vec<(u64, usize)> = bins.iter().map(|bin| self.tokens(bin)).zip(0..).collect();
        order.sort_unstable();
        let [(_, emptiest), others @ ..] = &order[..] else {
            return false;
        };
        let budget = self.budget;
        for &(_, partner) in others.iter().take(MOST_PARTNERS) {
            let rest = [&bins[*emptiest][..], &bins[partner]].concat();
            let free = others.iter().filter(|&&(tokens, bin)| tokens < budget && bin != partner);
            match self.pass_on(bins, rest, free.map(|&(_, bin)| bin)) {
                Some((filled, rest)) => {
                    filled.into_iter().for_each(|(bin, rows)| bins[bin] = rows);
                    bins[partner] = rest;
                    bins.remove(*emptiest);
                    return true;
                }
                None if self.words_left == 0 => return false,
                None => {}
            }
        }
        false
    }

    /// Fills one of the bins `free` after another from `rest`, until `rest` fits in one bin. Returns
    /// the new rows of the bins, and the rest; `None` if it never fits or the search takes too long.
    fn pass_on(
        &mut self,
        bins: &[Vec<u32>],
        mut rest: Vec<u32>,
        free: impl Iterator<Item = usize>,
    ) -> Option<(Vec<Refilled>, Vec<u32>)> {
        let mut filled = Vec::new();
        for bin in free {
            rest.extend(&bins[bin]);
            let (fullest, others) = self.split(rest)?;
            filled.push((bin, fullest));
            rest = others;
            if self.tokens(&rest) <= self.budget {
                self.sort(&mut rest);
                return Some((filled, rest));
            }
        }
        None
    }

    /// `None` when nothing is left to spend.
    fn spend(&mut self, words: usize) -> Option<()> {
        let left = self.words_left.checked_sub(words);
        self.words_left = left.unwrap_or(0);
        left.map(|_| ())
    }

    fn tokens(&self, rows: &[u32]) -> u64 {
        rows.iter().map(|&row| self.length(row) as u64).sum()
    }

    fn sort(&self, rows: &mut [u32]) {
        rows.sort_unstable_by_key(|&row| (Reverse(self.lengths[row as usize]), row));
    }

    fn length(&self, row: u32) -> usize {
        self.lengths[row as usize] as usize
    }

    /// The subset of `pool` with the most tokens within the budget, the longest samples first, and
    /// the others. `None` when the search has taken too long.
    ///
    /// Lengths 5, 4, 3 and a budget of 8 reach the sums 0, 5, then 4, then 3, 7, 8: the subset is
    /// 5 and 3.
    fn split(&mut self, mut pool: Vec<u32>) -> Option<(Vec<u32>, Vec<u32>)> {
        self.sort(&mut pool);
        let budget = usize::try_from(self.budget).ok()?;
        let words = budget / 64 + 1;
        let mut sums = Sums { words, bits: Vec::new() };
        self.spend(words)?;
        sums.bits.resize(words, 0);
        sums.bits[0] = 1;
        let mut used = 0;
        while used < pool.len() && !sums.holds(used, budget) {
            self.spend(words)?;
            sums.add(self.length(pool[used]));
            used += 1;
        }
        let mut sum = (0..=budget).rev().find(|&sum| sums.holds(used, sum))?;
        let mut others = pool.split_off(used);
        let mut fullest = Vec::with_capacity(used);
        for row in pool.into_iter().rev() {
            used -= 1;
            if sums.holds(used, sum) {
                others.push(row);
            } else {
                sum -= self.length(row);
                fullest.push(row);
            }
        }
        fullest.reverse();
        Some((fullest, others))
    }
}

/// The sums that the first samples of a pool can reach: a row of bits for each number of samples.
struct Sums {
    words: usize,
    bits: Vec<u64>,
}

impl Sums {
    /// Whether the first `samples` reach `sum`.
    fn holds(&self, samples: usize, sum: usize) -> bool {
        self.bits[samples * self.words + sum / 64] >> (sum % 64) & 1 == 1
    }

    /// Adds a row: the sums of the last one, with and without a sample of `length`.
    fn add(&mut self, length: usize) {
        let begin = self.bits.len() - self.words;
        self.bits.extend_from_within(begin..);
        let (before, after) = self.bits.split_at_mut(begin + self.words);
        let before = &before[begin..];
        let (skipped, shift) = (length / 64, length % 64);
        if skipped >= self.words {
            return;
        }
        for (word, &source) in after[skipped..].iter_mut().zip(before) {
            *word |= source << shift;
        }
        if shift > 0 {
            for (word, &source) in after[skipped + 1..].iter_mut().zip(before) {
                *word |= source >> (64 - shift);
            }
        }
    }
}
