/** Seeded random numbers: the same seed plays the same run. */

export class Random {
  private state: number;

  constructor(seed: number) {
    this.state = seed >>> 0;
  }

  /** From 0 (included) to 1. */
  next(): number {
    this.state = (this.state + 0x6d2b79f5) >>> 0;
    let mixed = this.state;
    mixed = Math.imul(mixed ^ (mixed >>> 15), mixed | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 4_294_967_296;
  }

  between(low: number, high: number): number {
    return low + (high - low) * this.next();
  }

  /** Around `middle`, mostly within `spread`. */
  around(middle: number, spread: number): number {
    return middle + spread * (this.next() + this.next() + this.next() - 1.5);
  }

  hex(digits: number): string {
    let text = "";
    while (text.length < digits) text += Math.floor(this.next() * 16).toString(16);
    return text;
  }
}
