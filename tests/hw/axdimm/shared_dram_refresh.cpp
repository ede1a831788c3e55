// A shared DRAM, Verilated, between a host that refreshes at whim within JEDEC's limits, up to the
// last moment, and a controller that is busy at whim; the mode changes without end. Every REF on the
// pins is judged: gap, 17 in two tREFI, debt by the host's own intervals.
#include "VTop.h"
#include "verilated.h"
#include <cstdint>
#include <cstdio>
#include <algorithm>
#include <deque>
typedef int64_t i64;
static uint64_t S; static uint64_t rnd(){S^=S>>12;S^=S<<25;S^=S>>27;return (S*0x2545F4914F6CDD1DULL)>>33;}
static i64 pick(i64 n){return n<=1?0:(i64)(rnd()%n);}
extern "C" int run(uint64_t seed,i64 cycles,int refi,int trfc,int pull,int post,int style,double*out){
 // all in host clocks (2 a cycle)
 S=seed*2+1;for(int i=0;i<8;i++)rnd();
 VerilatedContext c; VTop d{&c};
 d.rst=1;for(int i=0;i<2;i++){d.clk=1;d.eval();d.clk=0;d.eval();}d.rst=0;
 i64 off=pick(refi); std::deque<i64> hr, dr; i64 count=0,dcount=0; i64 lasth=0,lastd=0;
 i64 begin=1,end=0,notb=0; bool refreshing=false; i64 ready=0; bool open=false; i64 refok=0, preok=0; 
 i64 maxgap=0,min17=1LL<<60,hmaxgap=0,hmin17=1LL<<60; int worstD=-99,lowD=99; i64 since_req=0,worstN=0,worstA=0; int want=0; i64 next=100; i64 changes=0; int density=pick(4); int bad=0; i64 holds=0,hides=0; bool busyh=true;
 int runmax=refi; 
 for(i64 cy=0;cy<cycles&&!bad;cy++){
  // drive after last tick
  int cmd=0,slot=0,bank=0;
  for(int s=0;s<2&&!cmd;s++){
   i64 now=cy*2+s; i64 due=now>0?(now-1+off)/refi:0; i64 owed=due-count; i64 left=refi-((now+off-1)%refi); 
   bool must=(owed>=8&&left<=24)||(now-lasth>=9LL*refi-24);
   bool full=hr.size()>=16&&now-hr[hr.size()-16]<2LL*refi;
   if(!refreshing&&(must||(owed>=begin&&now>=notb&&owed>-pull))){ i64 least=std::min<i64>(-pull,owed-1); end=owed-1-pick(owed-least); if(style)end=pick(2)?least:owed-1; else if(pick(2)==0)end=least; refreshing=true;}
   if(refreshing&&full&&style){refreshing=false;begin=owed;notb=0;}else if(refreshing&&full){refreshing=false;i64 most=std::max<i64>(post,owed+1);begin=owed+1+pick(most-owed);if(pick(3)==0)begin=99;notb=now+pick(2)*pick(2*refi);}
   if(now<ready)continue;
   if(refreshing){
     if(open){ if(now>=preok){cmd=2;slot=s;open=false;refok=now+6;ready=now+1;} }
     else if(now>=refok){cmd=3;slot=s;refok=ready=now+trfc;count++; if(now-lasth>hmaxgap)hmaxgap=now-lasth; if(hr.size()>=16)hmin17=std::min(hmin17,now-hr[hr.size()-16]); hr.push_back(now);if(hr.size()>40)hr.pop_front();lasth=now;
       refreshing=owed-1>end; if(!refreshing&&style){begin=pick(2)?99:owed;notb=pick(4)?0:now+pick(refi);}else if(!refreshing){i64 o=owed-1;i64 most=std::max<i64>(post,o+1);begin=o+1+pick(most-o);if(pick(3)==0)begin=99;notb=now+pick(2)*pick(2*refi);} }
   } else if(busyh||!(d.normal==0)){ // accesses
     if(density==3?true:pick(1<<(2+3*density))==0){ cmd=1;slot=s;bank=pick(4);open=true;preok=std::max(preok,now+14);ready=now+4; if(pick(3)==0&&now>=preok){cmd=2;open=false;refok=now+6;} }
   }
  }
  d.cmd=cmd;d.slot=slot;d.bank=bank;
  if(--next<=0){ if(want?d.kern:d.normal){ want=!want; since_req=cy; changes++; int k=pick(10); next=k<5?1+pick(40):k<8?1+pick(400):k<9?1+pick(refi):1+pick(9*refi/2); busyh=pick(3)!=0; if(pick(20)==0)density=pick(4); if(pick(2))d.busy=pick(2); d.drain=pick(50);} else next=1; }
  d.acc=want; d.rst_k=pick(3000)==0;
  d.eval();
  bool reached=want?d.kern:d.normal; if(!reached){ i64 w=cy-since_req; if(want)worstA=std::max(worstA,w); else worstN=std::max(worstN,w);} 
  holds+=d.hold; hides+=d.hide&&cmd==3&&d.normal;
  for(int p=0;p<4;p++) if(d.ref>>p&1){ i64 t=cy*4+p; i64 eq=t-4; // compare at host time (one cycle later on the pins)
    i64 T=2LL*refi; i64 gap=t-(lastd?lastd:4); maxgap=std::max(maxgap,gap); if(dr.size()>=16)min17=std::min(min17,t-dr[dr.size()-16]); dr.push_back(t);if(dr.size()>40)dr.pop_front();
    i64 due=eq>0?(eq-1+2*off)/T:0; int debt=due-dcount; worstD=std::max(worstD,debt); lowD=std::min(lowD,debt); if(dcount-due<8)dcount++; lastd=t; 
    if(gap>9*T)bad|=1; if(min17<2*T)bad|=2; if(debt>8)bad|=4; }
  if(cy*4-lastd>9LL*2*refi+8)bad|=8;
  if(bad)printf("bad %d at cycle %ld gap %.4f min17 %.4f debt %d e %d h %d normal %d kern %d\n",bad,(long)cy,maxgap/(2.0*refi),min17/(2.0*refi),worstD,(int)(signed char)(d.e<<2)>>2,(int)(signed char)(d.h<<2)>>2,d.normal,d.kern);
  d.clk=1;d.eval();d.clk=0;d.eval();
 }
 double r[]={maxgap/(2.0*refi),min17/(2.0*refi),(double)worstD,(double)lowD,(double)worstN,(double)worstA,(double)changes,hmaxgap/(double)refi,hmin17/(double)refi,(double)holds,(double)hides};
 for(int i=0;i<11;i++)out[i]=r[i];
 return bad;}
